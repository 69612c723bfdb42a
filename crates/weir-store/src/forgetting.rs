//! When truncation records may be forgotten: when they are old and all members are current.
use std::time::Duration;
use weir_env::Instant;

/// A truncation that has been on record for this time has ended, successfully or not: no client works on one
/// operation for longer than a minute, and a later operation of a client that was stopped in the middle is
/// fenced by the next truncation.
pub const TRUNCATION_AGE: Duration = Duration::from_secs(3600);

/// Schedule for forgetting truncations.
#[derive(Default, Debug)]
pub struct Forgetting {
    noted: Option<(Instant, u64)>,
}
impl Forgetting {
    /// The number up to which truncations may be forgotten now. `whole`: every member of every group of the
    /// target is current, so all of them have received every truncation that has ended.
    pub fn due(&mut self, now: Instant, newest: u64, whole: bool) -> Option<u64> {
        let (at, upto) = *self.noted.get_or_insert((now, newest));
        if now.since(at) < TRUNCATION_AGE || !whole {
            return None;
        }
        self.noted = Some((now, newest));
        (upto > 0).then_some(upto)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncations_are_forgotten_when_old_and_all_are_there() {
        let hour = |h: u64| Instant(0) + TRUNCATION_AGE * h as u32;
        let mut forgetting = Forgetting::default();
        let table = [
            (0, 5, true, None),
            (1, 7, false, None),
            (2, 8, true, Some(5)),
            (2, 9, true, None),
            (3, 9, true, Some(8)),
            (4, 9, true, Some(9)),
        ];
        for (at, newest, whole, due) in table {
            assert_eq!(forgetting.due(hour(at), newest, whole), due, "at {at}, newest {newest}");
        }
    }
}
