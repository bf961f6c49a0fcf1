//! The few CUDA driver calls that kvxfer needs, loaded at run time.
