//! The requests of administration: one row each. They change the cluster or its volumes, and are recorded in
//! the audit log, at least their refusal. Requests for the data or the names of files are not here: they are
//! too many.
//!
//! A row adds the request to the table of methods, and has the text of its record. A URL's query is left out
//! of that: it may name credential files, and in other programs' URLs a key itself.
use crate::coord::AuditVolumes;
use crate::copies::SetCopies;
use crate::home_rule::HomeRule;
use crate::map::Role;
use crate::recall::GetEviction;
use crate::relation::{RelationAdd, RelationRules, RelationSet};
use crate::sender::Sender;
use crate::volume::{VolumeChange, VolumeCreate};
use crate::{Method, Request, Result, Wire};

/// The subject of a request, as the audit log shows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Subject {
    pub on: String,
    /// The user in the request.
    pub uid: Option<u32>,
    /// It is not only a query.
    pub changes: bool,
}

impl Subject {
    fn on(on: impl Into<String>) -> Subject {
        Subject { on: on.into(), uid: None, changes: true }
    }
    fn by(self, uid: u32) -> Subject {
        Subject { uid: Some(uid), ..self }
    }
    fn changes_if(self, changes: bool) -> Subject {
        Subject { changes, ..self }
    }
}

macro_rules! administration {
    ($($module:ident::$name:ident: |$r:pat_param| $subject:expr;)*) => {
        pub(crate) const METHODS: &[Method] = &[
            $(Method { is_administration: true, ..Method::of::<crate::$module::$name>() },)*
        ];

        /// The subject of a request; `None`: the method is not one of administration.
        pub fn subject(method: u16, body: &[u8]) -> Option<Result<Subject>> {
            Some(match method {
                $(<crate::$module::$name as Request>::METHOD => {
                    crate::$module::$name::from_bytes(body).map(|$r| $subject)
                })*
                _ => return None,
            })
        }
    };
}

administration! {
    coord::Join: |r| {
        let disks: String = r.targets.iter().map(|t| format!(", disk {}", t.uuid)).collect();
        Subject::on(format!("{} {} of host {}{disks}", Sender::from(r.role), r.name, r.host))
    };
    coord::Leave: |r| Subject::on(format!("node {}", r.node));
    coord::ClearTarget: |r| Subject::on(format!("target {}", r.target));
    coord::TargetGone: |r| Subject::on(format!("target {}", r.target)).changes_if(!r.dry_run);
    coord::DrainTarget: |r| {
        let what = if r.stay { "is drained no more" } else { "is drained" };
        Subject::on(format!("target {} {what}", r.target)).changes_if(!r.dry_run)
    };
    coord::RemoveTarget: |r| Subject::on(format!("target {}", r.target));
    coord::SetRebuild: |r| Subject::on(format!("after {} s", r.after_s));
    coord::PauseMoves: |r| Subject::on(format!("moves {}", if r.paused { "paused" } else { "resumed" }));
    coord::MakeGroups: |r| {
        Subject::on(format!("scheme {}, pool {}", r.scheme, r.pool.as_deref().unwrap_or("any")))
    };
    coord::LeadNamespace: |r| {
        let instead = r.instead_of.map(|of| format!(", instead of {of}")).unwrap_or_default();
        Subject::on(format!("namespace {} {}, node {}{instead}", r.namespace, r.uuid, r.node))
    };
    coord::FinishUpgrade: |_| Subject::on("the cluster's level");
    coord::HomeAllow: |r| Subject::on(allowed(&r.rule));
    coord::HomeForbid: |r| Subject::on(format!("homes in {}", without_keys(&r.place)));
    coord::AccessAdd: |r| {
        let before = r.before.map(|rule| format!(", before rule {rule}")).unwrap_or_default();
        Subject::on(format!("rule {}{before}", r.rule))
    };
    coord::AccessRemove: |r| Subject::on(format!("rule {}", r.name));
    coord::AuditVolumes: |r| Subject::on(audited(&r));

    copies::SetCopies: |r| Subject::on(copies(&r));

    enrol::TokenCreate: |r| {
        Subject::on(format!("token for {}, nodes {:?}, uses {}", roles_of(&r.roles), r.name, r.uses))
    };
    enrol::TokenRevoke: |r| Subject::on(format!("token {}", r.id));
    enrol::Enrol: |r| Subject::on(format!("node {}", r.name));
    enrol::IssueCertificate: |r| Subject::on(format!("node {}, {}", r.name, roles_of(&r.roles)));
    enrol::NodeRemove: |r| Subject::on(format!("node {}", r.name));
    enrol::RotateAuthority: |r| {
        let skip = if r.skip { ", without missing nodes" } else { "" };
        Subject::on(format!("the cluster's authority{skip}"))
    };

    volume::VolumeCreate: |r| Subject::on(created(&r)).by(r.cred.uid);
    volume::VolumeChange: |r| {
        Subject::on(format!("volume {}: {}", r.volume, changes_of(&r))).by(r.cred.uid)
    };
    volume::SetWriteFloor: |r| {
        Subject::on(format!("volume {}: write floor {}", r.volume, r.members)).by(r.cred.uid)
    };
    volume::VolumeDelete: |r| {
        let force = if r.force { ", with all that is in it" } else { "" };
        Subject::on(format!("volume {}{force}", r.volume)).by(r.cred.uid)
    };
    volume::VolumeClone: |r| {
        let on = format!("{} from snapshot {} of volume {}", created(&r.new), r.snapshot, r.source);
        Subject::on(on).by(r.new.cred.uid)
    };
    volume::ScanInodes: |r| Subject::on(format!("volume {}", r.volume)).by(r.cred.uid).changes_if(false);
    quota::OwnerLimit: |r| {
        Subject::on(format!("limits of {}", r.holder.shown(&r.holder.volume.to_string()))).by(r.cred.uid)
    };

    relation::RelationAdd: |r| Subject::on(added(&r)).by(r.cred.uid);
    relation::RelationAddWith: |r| {
        Subject::on(format!("{}, {}", added(&r.new), of_rules(&r.rules))).by(r.cred.uid)
    };
    relation::RelationSet: |r| {
        let (relation, uid) = (r.relation, r.cred.uid);
        Subject::on(format!("relation {relation}: {}", of_rules(&rules_of(r)))).by(uid)
    };
    relation::RelationDo: |r| Subject::on(format!("relation {}: {:?}", r.relation, r.verb)).by(r.cred.uid);
    relation::RelationResolve: |r| {
        Subject::on(format!("relation {}, inode {}: {:?}", r.relation, r.ino, r.how)).by(r.cred.uid)
    };
    relation::RelationSuspect: |r| {
        Subject::on(format!("relation {}, inode {}", r.relation, r.ino)).by(r.cred.uid)
    };
    relation::ReadChanges: |r| Subject::on(format!("volume {}", r.volume)).by(r.cred.uid).changes_if(false);
    relation::AckChanges: |r| {
        Subject::on(format!("volume {}, cursor {}", r.volume, r.cursor)).by(r.cred.uid).changes_if(false)
    };
    relation::DropCursor: |r| {
        Subject::on(format!("volume {}, cursor {}", r.volume, r.cursor)).by(r.cred.uid)
    };

    recall::GetEviction: |r| Subject::on(marks(&r)).by(r.cred.uid).changes_if(r.set.is_some());
    snapshot::SnapshotTake: |r| {
        Subject::on(format!("volume {}, snapshot {}", r.volume, r.name)).by(r.cred.uid)
    };
    snapshot::SnapshotDelete: |r| {
        Subject::on(format!("volume {}, snapshot {}", r.volume, r.name)).by(r.cred.uid)
    };
    backup::BackupSet: |r| {
        let forget = if r.forget { ": forget" } else { "" };
        Subject::on(format!("volume {}, {}{forget}", r.volume, without_keys(&r.url))).by(r.cred.uid)
    };
    export::ExportBegin: |_| Subject::on("the namespace, into a file");
    export::ExportSet: |r| {
        let (dir, every_s, keep) = (r.dir, r.every_s, r.keep);
        Subject::on(format!("exports of the namespace to {dir:?} every {every_s} s, {keep} kept"))
    };
    event::MarkEvents: |r| {
        Subject::on(format!("events {} {}: {:?}, until {}", r.code, r.about, r.mark, r.until_s))
    };
}

fn copies(r: &SetCopies) -> String {
    let without = r.without.map(|node| format!(", without {node}")).unwrap_or_default();
    format!("namespace {}: {} copies{without}", r.namespace, r.copies)
}

fn audited(AuditVolumes { rule }: &AuditVolumes) -> String {
    let kinds = [(rule.opens, "opens"), (rule.changes, "changes")];
    let kinds: Vec<&str> = kinds.iter().filter(|kind| kind.0).map(|kind| kind.1).collect();
    format!("audit of volumes {}: {}", rule.volumes, kinds.join(", "))
}

fn roles_of(roles: &[Role]) -> String {
    let words: Vec<String> = roles.iter().map(|role| Sender::from(*role).to_string()).collect();
    words.join(", ")
}

/// A rule with its permissions.
fn allowed(rule: &HomeRule) -> String {
    let run_as = rule.run_as.as_ref().map(|user| format!(", as {user}"));
    let keep = rule.keep_setuid.then(|| ", set-user-ID".to_owned());
    let root = rule.allow_root.then(|| ", root".to_owned());
    let all: Vec<String> = [run_as, keep, root].into_iter().flatten().collect();
    format!("homes in {}{}", without_keys(&rule.place), all.concat())
}

fn created(new: &VolumeCreate) -> String {
    let path = String::from_utf8_lossy(&new.path);
    format!("volume {} at {path}, owner {}", new.name, new.owner)
}

fn changes_of(r: &VolumeChange) -> String {
    let name = r.name.as_ref().map(|name| format!("name {name}"));
    let owner = r.owner.map(|owner| format!("owner {owner}"));
    let admins = r.admins.as_ref().map(|admins| format!("administrators {admins:?}"));
    let quota = r.quota.map(|_| "limits".to_owned());
    let policy = r.policy.as_ref().map(|_| "policy".to_owned());
    let retention = r.retention.map(|_| "retention".to_owned());
    let all: Vec<String> = [name, owner, admins, quota, policy, retention].into_iter().flatten().collect();
    all.join(", ")
}

fn added(new: &RelationAdd) -> String {
    format!("volume {}, {:?} {}", new.volume, new.direction, without_keys(&new.url))
}

fn rules_of(r: RelationSet) -> RelationRules {
    RelationRules {
        include: r.include.unwrap_or_default(),
        exclude: r.exclude.unwrap_or_default(),
        bytes_per_s: r.bytes_per_s,
    }
}

fn of_rules(RelationRules { include, exclude, bytes_per_s }: &RelationRules) -> String {
    format!("include {include:?}, exclude {exclude:?}, bytes per second {bytes_per_s:?}")
}

fn marks(r: &GetEviction) -> String {
    r.set.as_ref().map_or_else(
        || "eviction levels".to_owned(),
        |set| format!("volume {}: eviction from {} % to {} %", set.volume, set.high, set.low),
    )
}

fn without_keys(url: &str) -> &str {
    url.split('?').next().unwrap_or_default()
}
