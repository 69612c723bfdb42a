//! `weir target`, `weir rebuild` and `weir inspect`: the life of targets, from their clearing to their loss.
pub mod args;
mod drain;
mod inspect;
mod rebuild;
mod replace;
mod scrub;

pub use inspect::inspect;
pub use rebuild::rebuild;

use args::TargetCommand;
use weir_admin::failure::Outcome;

pub fn run(command: &TargetCommand) -> Outcome<()> {
    match command {
        TargetCommand::Clear(args) => replace::clear(args),
        TargetCommand::Replace(args) => replace::replace(args),
        TargetCommand::Scrub(args) => scrub::scrub(args),
        TargetCommand::Gone(args) => rebuild::gone(args),
        TargetCommand::Drain(args) => drain::drain(args),
        TargetCommand::Undrain(args) => drain::undrain(args),
        TargetCommand::Remove(args) => drain::remove(args),
        TargetCommand::List(args) => drain::list(args),
    }
}
