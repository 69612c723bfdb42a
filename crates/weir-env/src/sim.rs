//! The simulated world: one seed, paused time.
