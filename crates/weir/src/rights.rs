//! The rights of root's that a mover keeps. It acts for volumes' owners, in places of theirs.
//!
//! Always holds: no program that it starts has more, with any set-uid bits.
use rustix::thread::{CapabilitySet, CapabilitySets};
use weir_admin::failure::{Doing, Outcome};

/// Owners, modes and contents of all files; devices and file capabilities, if a rule allows these; to act as
/// the user that a rule names.
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETGID);

/// Drops all others. To be called before the process has threads: each has rights of its own.
pub fn keep_movers_rights() -> Outcome<()> {
    rustix::thread::set_no_new_privs(true).doing("give up the right to new privileges")?;
    let own = rustix::thread::capabilities(None).doing("read this process's rights")?;
    for one in CapabilitySet::all().iter().filter(|one| !KEPT.contains(*one)) {
        // Best effort: a process without permission for this has no rights to pass to programs either.
        let _ = rustix::thread::remove_capability_from_bounding_set(one);
    }
    let kept = own.permitted.intersection(KEPT);
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets).doing("give up rights")
}
