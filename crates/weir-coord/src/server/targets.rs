//! Requests about targets that are lost or drained, about their places, and about members' lives.
use super::*;
use crate::decide::remove_target;
use crate::replacing::RebuildEvent;
use weir_proto::coord::{
    DrainTarget, GetRebuild, PauseMoves, PlaceCopied, RemoveTarget, ReportFull, ReportRefill, SetRebuild,
    TargetGone,
};
use weir_proto::life::{GetLives, ReportLife};

impl Coordinator {
    pub(super) fn change_targets(&self, call: &Call) -> Result<Handled> {
        Ok(match call.method {
            TargetGone::METHOD => {
                let asked = call.decode::<TargetGone>()?;
                self.rebuild::<TargetGone>(|answer| RebuildEvent::Gone { asked, answer })
            }
            DrainTarget::METHOD => {
                let asked = call.decode::<DrainTarget>()?;
                self.rebuild::<DrainTarget>(|answer| RebuildEvent::Drain { asked, answer })
            }
            RemoveTarget::METHOD => {
                let RemoveTarget { target } = call.decode::<RemoveTarget>()?;
                let change = Box::new(move |map: &mut ClusterMap| remove_target(map, target));
                self.ask_map::<RemoveTarget>(call, |answer| Event::Rules { change, answer })
            }
            PlaceCopied::METHOD => {
                let report = call.decode::<PlaceCopied>()?;
                let event = |answer| Event::Rebuild(RebuildEvent::Copied { report, answer });
                self.ask_map::<PlaceCopied>(call, event)
            }
            ReportFull::METHOD => {
                let report = call.decode::<ReportFull>()?;
                self.rebuild::<ReportFull>(|answer| RebuildEvent::Full { report, answer })
            }
            PauseMoves::METHOD => {
                let PauseMoves { paused } = call.decode::<PauseMoves>()?;
                self.rebuild::<PauseMoves>(|answer| RebuildEvent::Pause { paused, answer })
            }
            SetRebuild::METHOD => {
                let asked = call.decode::<SetRebuild>()?;
                self.rebuild::<SetRebuild>(|answer| RebuildEvent::Set { asked, answer })
            }
            GetRebuild::METHOD => {
                call.decode::<GetRebuild>()?;
                self.rebuild::<GetRebuild>(|answer| RebuildEvent::Status { answer })
            }
            ReportRefill::METHOD => {
                let ReportRefill { reports } = call.decode::<ReportRefill>()?;
                self.rebuild::<ReportRefill>(|answer| RebuildEvent::Refills { reports, answer })
            }
            ReportLife::METHOD => {
                let ReportLife { node, life } = call.decode()?;
                let joined = self.signs.note_life(&call.connection, node, life, self.env.clock.now());
                let not_joined = || Err(Error::stale("no node has joined on this connection"));
                Handled::Now(if joined { Ok(Reply::new(&())) } else { not_joined() })
            }
            GetLives::METHOD => {
                call.decode::<GetLives>()?;
                Handled::Now(Ok(Reply::new(&self.signs.list(self.env.clock.now()))))
            }
            _ => return self.answer_at_once(call),
        })
    }

    fn rebuild<R: Request>(&self, event: impl FnOnce(Answer<R::Reply>) -> RebuildEvent) -> Handled
    where
        R::Reply: Send + 'static,
    {
        self.ask::<R>(|answer| Event::Rebuild(event(answer)))
    }
}
