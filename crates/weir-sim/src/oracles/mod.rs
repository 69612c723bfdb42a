//! Oracles of load: claims about a cluster that has more work than it can do.
//!
//! They look from outside, at the map and at the meters of the servers, and change no run, except the wait
//! for quiet at the end of one.

pub mod epochs;
pub mod idle;
pub mod served;
pub mod work;

use std::str::FromStr;

/// Which claims a run checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Oracles {
    /// No epoch is raised for a live node: [`epochs`].
    pub epochs: bool,
    /// Work is bounded by what was asked: [`work`].
    pub work: bool,
    /// The cluster is idle soon after the load ends: [`idle`].
    pub idle: bool,
}

impl Oracles {
    pub const ALL: Oracles = Oracles { epochs: true, work: true, idle: true };
    pub const NONE: Oracles = Oracles { epochs: false, work: false, idle: false };

    /// As on the command line.
    pub fn names(self) -> String {
        let names = [(self.epochs, "epochs"), (self.work, "work"), (self.idle, "idle")];
        let chosen: Vec<&str> =
            names.into_iter().filter_map(|(is_chosen, name)| is_chosen.then_some(name)).collect();
        if chosen.is_empty() { "none".to_owned() } else { chosen.join(",") }
    }
}

impl FromStr for Oracles {
    type Err = String;
    fn from_str(names: &str) -> Result<Oracles, String> {
        let mut oracles = Oracles::NONE;
        for name in names.split(',') {
            match name {
                "epochs" => oracles.epochs = true,
                "work" => oracles.work = true,
                "idle" => oracles.idle = true,
                "all" => oracles = Oracles::ALL,
                "none" => oracles = Oracles::NONE,
                _ => return Err(format!("{name} is not an oracle: epochs, work, idle, all, none")),
            }
        }
        Ok(oracles)
    }
}
