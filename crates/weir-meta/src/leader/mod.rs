//! Calls that are more than one transaction.
mod changes;
mod movers;
mod names;
mod relations;
