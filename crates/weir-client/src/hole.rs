//! Whether a cell was never written, or its data is lost: decided from the reports of its stripe's members.
//!
//! All members know of a stripe that is written whole; the cell's own target and all parity targets know of
//! an overlay. So m + 1 members without a record are more than may have lost it; fewer prove nothing, and any
//! member that has a record is right.
use weir_proto::Error;
use weir_proto::data::CellStat;
use weir_proto::map::{Group, Scheme};

/// The answer of one member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    Nothing,
    /// It has a part of this cell, or of the stripe's base, of which every member has a part.
    Something,
    Silent(Error),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    Hole,
    Written,
    /// Too few members can be asked; the error of one that did not answer, if any.
    Undecided(Option<Error>),
}

/// The report of the member at `at` on the data cell `index`, from its own cell of the stripe.
pub fn reported(stat: &CellStat, at: usize, index: usize, scheme: Scheme) -> Answer {
    let of_cell = if at < usize::from(scheme.data) { 0 } else { index };
    let logged = stat.overlay_seqs.get(of_cell).is_some_and(|seq| seq.0 > 0);
    let counts = at >= usize::from(scheme.data) || at == index;
    match stat.known && (stat.base.0 > 0 || counts && logged) {
        true => Answer::Something,
        false => Answer::Nothing,
    }
}

/// The number of members that must have no record: m + 1, or all current members if these are fewer and
/// enough to write.
pub fn needed(group: &Group) -> usize {
    let (enough, current) = (usize::from(group.scheme.parity) + 1, group.current_count());
    if group.is_writable() { enough.min(current) } else { enough }
}

pub fn classify(reported: &[Answer], needed: usize) -> Verdict {
    if reported.contains(&Answer::Something) {
        return Verdict::Written;
    }
    if reported.iter().filter(|t| **t == Answer::Nothing).count() >= needed {
        return Verdict::Hole;
    }
    let silent = reported.iter().find_map(|t| if let Answer::Silent(e) = t { Some(e.clone()) } else { None });
    Verdict::Undecided(silent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::map::{Member, MemberState};
    use weir_proto::{Epoch, PgId, Seq, TargetId, Version};

    fn group(scheme: &str, current: usize) -> Group {
        let scheme: Scheme = scheme.parse().unwrap();
        let state = |i| if i < current { MemberState::Current } else { MemberState::Behind };
        let member =
            |i| Member { target: TargetId(i as u32), state: state(i), since: Epoch(1), lost_at: Epoch(0) };
        let members = (0..scheme.width()).map(member).collect();
        Group { id: PgId(0), pool: "hdd".into(), scheme, epoch: Epoch(1), members }
    }

    #[test]
    fn a_hole_is_believed_if_enough_members_know_nothing() {
        for (scheme, current, nothing, something, silent, is_hole) in [
            ("ec:4+2", 6, 3, 0, 0, Some(true)),
            ("ec:4+2", 6, 2, 0, 0, None),
            ("ec:4+2", 6, 2, 0, 1, None),
            ("ec:4+2", 6, 5, 1, 0, Some(false)),
            ("ec:4+2", 4, 3, 0, 0, Some(true)),
            // More members are lost than there are parity cells: m + 1 still prove a hole, fewer do not.
            ("ec:4+2", 3, 3, 0, 0, Some(true)),
            ("ec:4+2", 2, 2, 0, 0, None),
            ("replica:3", 3, 2, 0, 0, None),
            ("replica:3", 1, 1, 0, 0, Some(true)),
            ("replica:3", 0, 0, 0, 0, None),
            ("single", 1, 1, 0, 0, Some(true)),
            ("single", 0, 0, 0, 0, None),
        ] {
            let mut reported = vec![Answer::Nothing; nothing];
            reported.extend(vec![Answer::Something; something]);
            reported.extend(vec![Answer::Silent(Error::unavailable("away")); silent]);
            let expected = match is_hole {
                Some(true) => Verdict::Hole,
                Some(false) => Verdict::Written,
                None => Verdict::Undecided((silent > 0).then(|| Error::unavailable("away"))),
            };
            let found = classify(&reported, needed(&group(scheme, current)));
            assert_eq!(found, expected, "{scheme}, {current} current: {nothing}, {something}, {silent}");
        }
    }

    #[test]
    fn a_member_knows_a_cell_by_its_base_and_its_overlays() {
        let scheme: Scheme = "ec:4+2".parse().unwrap();
        let stat = |base: u64, seqs: &[u64]| CellStat {
            known: true,
            base: Version(base),
            prepared: vec![],
            overlay_seqs: seqs.iter().map(|s| Seq(*s)).collect(),
            folded_seqs: vec![],
            missing: 0,
            fragment_bytes: 0,
        };
        for (at, stat, expected) in [
            (4, stat(0, &[0, 0, 0, 0]), Answer::Nothing),
            (4, stat(0, &[1, 0, 0, 1]), Answer::Nothing),
            (5, stat(0, &[0, 0, 3, 0]), Answer::Something),
            (5, stat(7, &[0, 0, 0, 0]), Answer::Something),
            (1, stat(0, &[9]), Answer::Nothing),
            (1, stat(7, &[0]), Answer::Something),
            (2, stat(0, &[9]), Answer::Something),
            (2, CellStat { known: false, ..stat(0, &[0]) }, Answer::Nothing),
        ] {
            assert_eq!(reported(&stat, at, 2, scheme), expected, "{at}: {stat:?}");
        }
    }
}
