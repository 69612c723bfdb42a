//! A service whose requests of administration are audited: request, sender and outcome.
//!
//! The table of methods declares which these are, so all others pass with one look-up. A request is recorded
//! when its outcome is known. Knows nothing of the service's work.
use crate::audit::Audit;
use std::sync::Arc;
use weir_proto::backup::BackupSet;
use weir_proto::coord::{
    AccessAdd, AccessRemove, AuditVolumes, ClearTarget, DrainTarget, FinishUpgrade, GetAudit, HomeAllow,
    HomeForbid, Join, LeadNamespace, Leave, MakeGroups, PauseMoves, RemoveTarget, SetRebuild, TargetGone,
};
use weir_proto::copies::SetCopies;
use weir_proto::enrol::{Enrol, IssueCertificate, NodeRemove, RotateAuthority, TokenCreate, TokenRevoke};
use weir_proto::event::MarkEvents;
use weir_proto::export::{ExportBegin, ExportSet};
use weir_proto::home_rule::HomeRule;
use weir_proto::map::Role;
use weir_proto::methods::{self, Method};
use weir_proto::quota::OwnerLimit;
use weir_proto::recall::GetEviction;
use weir_proto::relation::{
    AckChanges, DropCursor, ReadChanges, RelationAdd, RelationAddWith, RelationDo, RelationResolve,
    RelationRules, RelationSet, RelationSuspect,
};
use weir_proto::sender::Sender;
use weir_proto::snapshot::{SnapshotDelete, SnapshotTake};
use weir_proto::volume::{ScanInodes, SetWriteFloor, VolumeChange, VolumeClone, VolumeCreate, VolumeDelete};
use weir_proto::{Error, ErrorKind, NameRule, Request, Result};
use weir_rpc::{Call, Connection, Defer, Handled, Proved, Reply, Service};
use weir_trust::audit::{Outcome, Record};

pub(crate) struct Audited {
    pub service: Arc<dyn Service>,
    pub audit: Audit,
}

impl Audited {
    /// Serves a request of administration. It is rare, so a task for its answer does not matter.
    fn witness(&self, method: &Method, call: Call) -> Handled {
        let About { on, uid, changes } = about(&call);
        let audit = self.audit.clone();
        let record = self.record(method, &call.connection, on, uid);
        let note = move |result: &Result<Reply>| {
            let result = outcome(result.as_ref().err());
            if changes || matches!(result, Outcome::Refused(_)) {
                audit.record(Record { result, ..record });
            }
        };
        match self.service.handle(call) {
            Handled::Now(result) => {
                note(&result);
                Handled::Now(result)
            }
            Handled::Later(work) => Handled::Later(Box::pin(async move {
                let result = work.await;
                note(&result);
                result
            })),
        }
    }

    fn record(&self, method: &Method, by: &Connection, on: String, uid: Option<u32>) -> Record {
        let proved = by.proved();
        let uid = match proved {
            Proved::User(uid) => Some(uid),
            Proved::Node(_) | Proved::Stranger => uid,
        };
        Record {
            time_ns: self.audit.now_ns(),
            node: by.peer().name.clone(),
            from: by.peer_addr().to_owned(),
            role: proved.sender().to_string(),
            uid,
            what: method.name.to_owned(),
            on,
            result: Outcome::Done,
            again: 0,
        }
    }
}

impl Service for Audited {
    fn handle(&self, call: Call) -> Handled {
        if call.method == GetAudit::METHOD {
            return Handled::Now(call.decode::<GetAudit>().map(|_| Reply::new(&self.audit.state())));
        }
        match audited(call.method) {
            Some(method) => self.witness(method, call),
            None => self.service.handle(call),
        }
    }
    fn handle_or_defer(&self, call: Call, defer: Defer<'_>) -> Option<Handled> {
        match call.method == GetAudit::METHOD || audited(call.method).is_some() {
            true => Some(self.handle(call)),
            false => self.service.handle_or_defer(call, defer),
        }
    }
    fn method(&self, number: u16) -> Option<&'static Method> {
        self.service.method(number)
    }
    fn refused(&self, method: &Method, by: &Connection, why: &Error) {
        let record = self.record(method, by, String::new(), None);
        self.audit.record(Record { result: outcome(Some(why)), ..record });
        self.service.refused(method, by, why);
    }
    fn admits_guests(&self) -> bool {
        self.service.admits_guests()
    }
    fn admits_strangers(&self) -> bool {
        self.service.admits_strangers()
    }
    fn payload_max(&self, from: Sender) -> u32 {
        self.service.payload_max(from)
    }
    fn caught_up(&self) {
        self.service.caught_up();
    }
    fn disconnected(&self, connection: &Connection) {
        self.service.disconnected(connection);
    }
}

/// The record of a refusal by the rules for mounts.
pub(crate) fn refused_by_rule(audit: &Audit, refusal: weir_meta::Refusal) -> Record {
    Record {
        time_ns: audit.now_ns(),
        node: refusal.node,
        from: refusal.from,
        role: Sender::Mount.to_string(),
        uid: refusal.uid,
        what: refusal.what.to_owned(),
        on: format!("volume {}", refusal.volume),
        result: Outcome::Refused(refusal.why),
        again: 0,
    }
}

/// An open or a change in a volume that is audited.
pub(crate) fn of_volume(audit: &Audit, seen: weir_meta::Witnessed) -> Record {
    Record {
        time_ns: audit.now_ns(),
        node: seen.node,
        from: seen.from,
        role: seen.role.to_string(),
        uid: seen.uid,
        what: seen.what.to_owned(),
        on: seen.on,
        result: outcome(seen.error.as_ref()),
        again: 0,
    }
}

fn audited(number: u16) -> Option<&'static Method> {
    methods::find(number).filter(|method| method.is_administration)
}

fn outcome(error: Option<&Error>) -> Outcome {
    match error {
        None => Outcome::Done,
        Some(e) => match e.kind {
            ErrorKind::Denied | ErrorKind::Name(NameRule::NotOwner) => Outcome::Refused(e.to_string()),
            _ => Outcome::Failed(e.to_string()),
        },
    }
}

/// The subject of a request.
struct About {
    on: String,
    /// The user in the request.
    uid: Option<u32>,
    /// It is not only a query.
    changes: bool,
}

/// A request that cannot be decoded is recorded with the service's error.
fn about(call: &Call) -> About {
    decoded(call).unwrap_or(About { on: String::new(), uid: None, changes: true })
}

fn copies(r: &SetCopies) -> String {
    let without = r.without.map(|node| format!(", without {node}")).unwrap_or_default();
    format!("namespace {}: {} copies{without}", r.namespace, r.copies)
}

fn audit_rule(AuditVolumes { rule }: &AuditVolumes) -> String {
    let kinds = [(rule.opens, "opens"), (rule.changes, "changes")];
    let kinds: Vec<&str> = kinds.iter().filter(|kind| kind.0).map(|kind| kind.1).collect();
    format!("audit of volumes {}: {}", rule.volumes, kinds.join(", "))
}

/// Requests about a target that is lost, or drained.
fn of_target(call: &Call) -> Result<About> {
    let (on, changes) = match call.method {
        TargetGone::METHOD => {
            let r = call.decode::<TargetGone>()?;
            (format!("target {}", r.target), !r.dry_run)
        }
        DrainTarget::METHOD => {
            let r = call.decode::<DrainTarget>()?;
            let what = if r.stay { "is no longer drained" } else { "is drained" };
            (format!("target {} {what}", r.target), !r.dry_run)
        }
        _ => (format!("target {}", call.decode::<RemoveTarget>()?.target), true),
    };
    Ok(About { on, uid: None, changes })
}

fn decoded(call: &Call) -> Result<About> {
    let changed = |on: String, uid| About { on, uid, changes: true };
    let read = |on: String, uid: u32| About { on, uid: Some(uid), changes: false };
    if let Some(about) = decoded_of_relation(call)? {
        return Ok(about);
    }
    Ok(match call.method {
        Join::METHOD => {
            let r = call.decode::<Join>()?;
            let disks: Vec<String> = r.targets.iter().map(|t| format!(", disk {}", t.uuid)).collect();
            let role = Sender::from(r.role);
            changed(format!("{role} {} of host {}{}", r.name, r.host, disks.concat()), None)
        }
        Leave::METHOD => changed(format!("node {}", call.decode::<Leave>()?.node), None),
        ClearTarget::METHOD => changed(format!("target {}", call.decode::<ClearTarget>()?.target), None),
        TargetGone::METHOD | DrainTarget::METHOD | RemoveTarget::METHOD => of_target(call)?,
        PauseMoves::METHOD => {
            let paused = call.decode::<PauseMoves>()?.paused;
            changed(format!("moves {}", if paused { "paused" } else { "resumed" }), None)
        }
        SetRebuild::METHOD => changed(format!("after {} s", call.decode::<SetRebuild>()?.after_s), None),
        MakeGroups::METHOD => {
            let r = call.decode::<MakeGroups>()?;
            changed(format!("scheme {}, pool {}", r.scheme, r.pool.as_deref().unwrap_or("any")), None)
        }
        LeadNamespace::METHOD => {
            let r = call.decode::<LeadNamespace>()?;
            let instead = r.instead_of.map(|of| format!(", instead of {of}")).unwrap_or_default();
            changed(format!("namespace {} {}, node {}{instead}", r.namespace, r.uuid, r.node), None)
        }
        AccessAdd::METHOD => {
            let r = call.decode::<AccessAdd>()?;
            let before = r.before.map(|rule| format!(", before rule {rule}")).unwrap_or_default();
            changed(format!("rule {}{before}", weir_trust::rules::shown(&r.rule)), None)
        }
        SetCopies::METHOD => changed(copies(&call.decode()?), None),
        AuditVolumes::METHOD => changed(audit_rule(&call.decode()?), None),
        AccessRemove::METHOD => changed(format!("rule {}", call.decode::<AccessRemove>()?.name), None),
        FinishUpgrade::METHOD => changed("the cluster's level".into(), None),
        HomeAllow::METHOD => changed(allowed(&call.decode::<HomeAllow>()?.rule), None),
        HomeForbid::METHOD => {
            changed(format!("homes in {}", without_keys(&call.decode::<HomeForbid>()?.place)), None)
        }
        ExportBegin::METHOD => changed("the namespace, into a file".into(), None),
        ExportSet::METHOD => {
            let ExportSet { dir, every_s, keep } = call.decode()?;
            changed(format!("exports of the namespace to {dir:?} every {every_s} s, {keep} kept"), None)
        }
        ScanInodes::METHOD => {
            let r = call.decode::<ScanInodes>()?;
            read(format!("volume {}", r.volume), r.cred.uid)
        }
        _ => return decoded_of_volumes(call),
    })
}

/// Requests about volumes and their limits.
fn decoded_of_volumes(call: &Call) -> Result<About> {
    let changed = |on: String, uid| About { on, uid, changes: true };
    Ok(match call.method {
        VolumeCreate::METHOD => {
            let r = call.decode::<VolumeCreate>()?;
            changed(created(&r), Some(r.cred.uid))
        }
        VolumeChange::METHOD => {
            let r = call.decode::<VolumeChange>()?;
            changed(format!("volume {}: {}", r.volume, changes_of(&r)), Some(r.cred.uid))
        }
        SetWriteFloor::METHOD => {
            let r = call.decode::<SetWriteFloor>()?;
            changed(format!("volume {}: write floor {}", r.volume, r.members), Some(r.cred.uid))
        }
        OwnerLimit::METHOD => {
            let r = call.decode::<OwnerLimit>()?;
            let name = r.holder.volume.to_string();
            changed(format!("limits of {}", r.holder.shown(&name)), Some(r.cred.uid))
        }
        VolumeDelete::METHOD => {
            let r = call.decode::<VolumeDelete>()?;
            let force = if r.force { ", with all that is in it" } else { "" };
            changed(format!("volume {}{force}", r.volume), Some(r.cred.uid))
        }
        VolumeClone::METHOD => {
            let r = call.decode::<VolumeClone>()?;
            let on = format!("{} from snapshot {} of volume {}", created(&r.new), r.snapshot, r.source);
            changed(on, Some(r.new.cred.uid))
        }
        _ => return decoded_of_enrolment(call),
    })
}

/// Requests about certificates, tokens, and marks of events.
fn decoded_of_enrolment(call: &Call) -> Result<About> {
    let changed = |on: String, uid| About { on, uid, changes: true };
    Ok(match call.method {
        TokenCreate::METHOD => {
            let r = call.decode::<TokenCreate>()?;
            changed(format!("token for {}, nodes {:?}, uses {}", roles_of(&r.roles), r.name, r.uses), None)
        }
        MarkEvents::METHOD => {
            let r = call.decode::<MarkEvents>()?;
            changed(format!("events {} {}: {:?}, until {}", r.code, r.about, r.mark, r.until_s), None)
        }
        TokenRevoke::METHOD => changed(format!("token {}", call.decode::<TokenRevoke>()?.id), None),
        Enrol::METHOD => changed(format!("node {}", call.decode::<Enrol>()?.name), None),
        IssueCertificate::METHOD => {
            let r = call.decode::<IssueCertificate>()?;
            changed(format!("node {}, {}", r.name, roles_of(&r.roles)), None)
        }
        NodeRemove::METHOD => changed(format!("node {}", call.decode::<NodeRemove>()?.name), None),
        RotateAuthority::METHOD => {
            let skip = if call.decode::<RotateAuthority>()?.skip { ", without missing nodes" } else { "" };
            changed(format!("the cluster's authority{skip}"), None)
        }
        _ => return decoded_of_volume(call),
    })
}

/// Rules of a relation as they are set.
fn of_rules(rules: &RelationRules) -> String {
    let RelationRules { include, exclude, bytes_per_s } = rules;
    format!("include {include:?}, exclude {exclude:?}, bytes per second {bytes_per_s:?}")
}

/// Requests about relations.
fn decoded_of_relation(call: &Call) -> Result<Option<About>> {
    let changed = |on: String, uid: u32| About { on, uid: Some(uid), changes: true };
    Ok(Some(match call.method {
        RelationAdd::METHOD => {
            let r = call.decode::<RelationAdd>()?;
            changed(format!("volume {}, {:?} {}", r.volume, r.direction, without_keys(&r.url)), r.cred.uid)
        }
        RelationAddWith::METHOD => {
            let RelationAddWith { new, rules, cred, .. } = call.decode::<RelationAddWith>()?;
            let url = without_keys(&new.url);
            changed(
                format!("volume {}, {:?} {url}, {}", new.volume, new.direction, of_rules(&rules)),
                cred.uid,
            )
        }
        RelationSet::METHOD => {
            let r = call.decode::<RelationSet>()?;
            let rules = RelationRules {
                include: r.include.unwrap_or_default(),
                exclude: r.exclude.unwrap_or_default(),
                bytes_per_s: r.bytes_per_s,
            };
            changed(format!("relation {}: {}", r.relation, of_rules(&rules)), r.cred.uid)
        }
        RelationDo::METHOD => {
            let r = call.decode::<RelationDo>()?;
            changed(format!("relation {}: {:?}", r.relation, r.verb), r.cred.uid)
        }
        RelationResolve::METHOD => {
            let r = call.decode::<RelationResolve>()?;
            changed(format!("relation {}, inode {}: {:?}", r.relation, r.ino, r.how), r.cred.uid)
        }
        RelationSuspect::METHOD => {
            let r = call.decode::<RelationSuspect>()?;
            changed(format!("relation {}, inode {}", r.relation, r.ino), r.cred.uid)
        }
        _ => return Ok(None),
    }))
}

/// The others: requests about volumes.
fn decoded_of_volume(call: &Call) -> Result<About> {
    let changed = |on: String, uid: u32| About { on, uid: Some(uid), changes: true };
    let read = |on: String, uid: u32| About { on, uid: Some(uid), changes: false };
    Ok(match call.method {
        BackupSet::METHOD => {
            let r = call.decode::<BackupSet>()?;
            let forget = if r.forget { ": forget" } else { "" };
            changed(format!("volume {}, {}{forget}", r.volume, without_keys(&r.url)), r.cred.uid)
        }
        SnapshotTake::METHOD => {
            let r = call.decode::<SnapshotTake>()?;
            changed(format!("volume {}, snapshot {}", r.volume, r.name), r.cred.uid)
        }
        SnapshotDelete::METHOD => {
            let r = call.decode::<SnapshotDelete>()?;
            changed(format!("volume {}, snapshot {}", r.volume, r.name), r.cred.uid)
        }
        GetEviction::METHOD => {
            let r = call.decode::<GetEviction>()?;
            match r.set {
                Some(set) => {
                    let marks =
                        format!("volume {}: eviction from {} % to {} %", set.volume, set.high, set.low);
                    changed(marks, r.cred.uid)
                }
                None => read("eviction levels".into(), r.cred.uid),
            }
        }
        ReadChanges::METHOD => {
            let r = call.decode::<ReadChanges>()?;
            read(format!("volume {}", r.volume), r.cred.uid)
        }
        AckChanges::METHOD => {
            let r = call.decode::<AckChanges>()?;
            read(format!("volume {}, cursor {}", r.volume, r.cursor), r.cred.uid)
        }
        DropCursor::METHOD => {
            let r = call.decode::<DropCursor>()?;
            changed(format!("volume {}, cursor {}", r.volume, r.cursor), r.cred.uid)
        }
        _ => return Err(call.unknown()),
    })
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

/// A URL's query may name credential files, and in other programs' URLs a key itself.
fn without_keys(url: &str) -> &str {
    url.split('?').next().unwrap_or_default()
}
