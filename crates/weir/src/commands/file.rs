//! `weir file`: the mount's information on files, and their tiering.
pub mod args;
mod show;
pub mod tiering;

use args::FileCommand;
use weir_admin::failure::Outcome;

pub fn run(command: &FileCommand) -> Outcome<()> {
    match command {
        FileCommand::Stat(args) => show::stat(args),
        FileCommand::Layout(args) => show::layout(args),
        FileCommand::Locks(args) => show::locks(args),
        FileCommand::Evict(args) => tiering::evict(args),
        FileCommand::Recall(args) => tiering::recall(args),
        FileCommand::Pin(args) => tiering::pin(args, true),
        FileCommand::Unpin(args) => tiering::pin(args, false),
        FileCommand::State(args) => tiering::state(args),
    }
}
