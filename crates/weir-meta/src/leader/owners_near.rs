//! The report on users and groups near their limits, for `weir status`.
use crate::leader::Leader;
use crate::near_limits;
use weir_proto::Result;
use weir_proto::quota::OwnersNear;

impl Leader {
    pub(crate) fn owners_near(&self) -> Result<OwnersNear> {
        self.near_limits.or_new(self.env.clock.now(), || {
            let (state, mut report) = (self.lock(), OwnersNear::default());
            self.kv.read(&mut |read| {
                report = near_limits::near(read, &state.quotas, self.wall())?;
                Ok(())
            })?;
            Ok(report)
        })
    }
}
