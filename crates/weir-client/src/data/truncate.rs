//! Truncation of a file at all live targets of its groups.
use super::{Data, LOSS_PATIENCE, MAP_PATIENCE, is_unreachable, may_return};
use crate::join::join_all;
use crate::targets::Pacing;
use std::collections::BTreeMap;
use weir_env::{BoxFuture, Instant};
use weir_proto::data::{DropFile, GroupAt, Place, PreparedCell};
use weir_proto::map::{ClusterMap, Layout, Member, MemberState};
use weir_proto::{Epoch, Error, ErrorKind, FileId, PgId, Result, TargetId};

impl Data {
    /// Truncates the file at every live target of its groups: stripes from `from_stripe` on hold nothing that
    /// was written with a token epoch below `fence`, and later writes with one are refused. Absent members
    /// receive the truncation record when they return. Returns the versions in doubt.
    pub async fn drop_file(
        &self,
        file: FileId,
        layout: &Layout,
        from_stripe: u64,
        fence: u32,
        deadline: Instant,
    ) -> Result<Vec<PreparedCell>> {
        let of_file = |g: PgId| g.0 >= layout.first_pg.0 && g.0 - layout.first_pg.0 < layout.pg_count;
        let doing = |e: Error| e.doing(format!("truncate file {file} from stripe {from_stripe} on"));
        let mut give_up = None;
        let mut retry = self.targets.retry(deadline);
        loop {
            let map = self.cluster.map();
            let targets = match map.members_to_truncate(of_file) {
                Ok(targets) => targets,
                Err(e) => {
                    let comes_back = map.groups.iter().filter(|g| of_file(g.id)).all(|g| may_return(&map, g));
                    let patience = if comes_back {
                        self.targets.left(deadline)
                    } else {
                        LOSS_PATIENCE.min(self.targets.left(deadline))
                    };
                    let give_up = *give_up.get_or_insert_with(|| self.env.clock.now() + patience);
                    if self.targets.left(give_up).is_zero() {
                        return Err(doing(e));
                    }
                    let _waiting = self.waits.begin("targets that are to truncate a file".into());
                    self.targets.wait_newer(map.version, self.targets.left(give_up)).await;
                    continue;
                }
            };
            give_up = None;
            let e = match self.drop_file_at(targets, file, from_stripe, fence, deadline).await {
                Ok(prepared) => {
                    self.maps.note_written(map.version);
                    return Ok(prepared);
                }
                Err(e) => e,
            };
            if !retry.has_time() {
                return Err(doing(e.of_kind(ErrorKind::Deadline).doing("not done by the deadline")));
            }
            if e.kind == ErrorKind::Stale {
                self.targets.wait_newer(map.version, MAP_PATIENCE.min(self.targets.left(deadline))).await;
            } else if !is_unreachable(&e) {
                return Err(doing(e));
            } else if self.cluster.map().version == map.version {
                retry.pause().await;
            }
        }
    }

    /// One round; an error reports the target that did not answer.
    async fn drop_file_at(
        &self,
        targets: BTreeMap<TargetId, Vec<GroupAt>>,
        file: FileId,
        from_stripe: u64,
        fence: u32,
        deadline: Instant,
    ) -> Result<Vec<PreparedCell>> {
        let calls = targets.into_iter().map(|(target, epochs)| {
            Box::pin(async move {
                let at = epochs.first().cloned().unwrap_or(GroupAt { group: PgId(0), epoch: Epoch(0) });
                let place = Place { target, group: at.group, epoch: at.epoch };
                let to_stripe = u64::MAX;
                let request = DropFile { target, file, from_stripe, to_stripe, fence, epochs };
                let down = |m: &Member| m.target == target && m.state == MemberState::Down;
                let is_down =
                    |map: &ClusterMap| map.group(at.group).is_some_and(|g| g.members.iter().any(down));
                let sent =
                    self.targets.call_while_up(place, is_down, &request, vec![], Pacing::Write, deadline);
                let answer = sent.await;
                if let Err(e) = &answer
                    && is_unreachable(e)
                {
                    self.targets.report(place, e).await;
                }
                Ok(answer?.reply.prepared)
            }) as BoxFuture<'_, _>
        });
        let answers: Vec<Result<Vec<PreparedCell>>> = join_all(calls.collect()).await;
        let answers: Vec<Vec<PreparedCell>> = answers.into_iter().collect::<Result<_>>()?;
        let mut prepared: Vec<PreparedCell> = answers.into_iter().flatten().collect();
        prepared.sort_by_key(|p| (p.cell, p.version));
        Ok(prepared)
    }
}
