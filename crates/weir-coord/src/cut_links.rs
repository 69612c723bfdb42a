//! Broken links that nodes report, for `weir status`.
//!
//! No decision depends on them: each node routes around its own broken links. A report that is not repeated
//! expires.
use std::collections::BTreeMap;
use std::time::Duration;
use weir_env::Instant;
use weir_proto::NodeId;
use weir_proto::coord::{CutLink, LINK_REPORT_MS, ReportLink};
use weir_proto::frame::Hello;

/// A report that is this old no longer counts: its reporter may be gone.
const FORGOTTEN_AFTER: Duration = Duration::from_millis(3 * LINK_REPORT_MS);
/// Links remembered; a longer list would not be read.
const LINKS_MAX: usize = 1024;
/// Bytes of a reason that are kept.
const WHY_MAX: usize = 256;

#[derive(Default)]
pub struct CutLinks {
    /// By the reporter's name, its process, and the node that it cannot reach.
    of: BTreeMap<(String, u64, NodeId), Reported>,
}

struct Reported {
    received: Instant,
    link: CutLink,
}

impl CutLinks {
    pub fn note(&mut self, from: &Hello, report: &ReportLink, now: Instant) {
        self.forget(now);
        let key = (from.name.clone(), from.instance, report.node);
        if report.cut_ms == 0 {
            self.of.remove(&key);
            return;
        }
        if self.of.len() >= LINKS_MAX && !self.of.contains_key(&key) {
            return;
        }
        let why: String = report.why.chars().filter(|c| !c.is_control()).take(WHY_MAX).collect();
        let link = CutLink {
            from: from.name.clone(),
            role: from.role,
            to: report.node,
            since_ms: report.cut_ms,
            why,
        };
        self.of.insert(key, Reported { received: now, link });
    }

    /// The links that are cut now, in the order of their reporters' names.
    pub fn list(&mut self, now: Instant) -> Vec<CutLink> {
        self.forget(now);
        let of = self.of.values().map(|r| {
            let since_ms = r.link.since_ms + now.since(r.received).as_millis() as u64;
            CutLink { since_ms, ..r.link.clone() }
        });
        of.collect()
    }

    fn forget(&mut self, now: Instant) {
        self.of.retain(|_, r| now.since(r.received) < FORGOTTEN_AFTER);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::map::Role;

    #[test]
    fn a_cut_link_is_listed_until_it_works_or_reports_end() {
        let at = |ms: u64| Instant(ms * 1_000_000);
        let from = |name: &str| Hello {
            version_min: 1,
            version_max: 1,
            level: 1,
            cluster: None,
            name: name.into(),
            role: Role::Mount,
            instance: 7,
        };
        let cut = |ms| ReportLink { node: NodeId(3), cut_ms: ms, why: "no answer\u{202e}\n".into() };
        let mut links = CutLinks::default();
        links.note(&from("m2"), &cut(1), at(1000));
        links.note(&from("m1"), &cut(500), at(1500));
        let listed: Vec<(String, u64)> =
            links.list(at(2000)).into_iter().map(|l| (l.from, l.since_ms)).collect();
        assert_eq!(listed, [("m1".into(), 1000), ("m2".into(), 1001)]);
        assert!(!links.list(at(2000))[0].why.contains('\n'));
        links.note(&from("m1"), &cut(0), at(2500));
        assert_eq!(links.list(at(2500)).len(), 1);
        assert!(links.list(at(1000 + 3 * LINK_REPORT_MS)).is_empty(), "m2 has not reported it since");
    }
}
