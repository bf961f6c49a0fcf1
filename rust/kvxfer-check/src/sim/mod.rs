//! Long seeded runs over the simulated fabric.
