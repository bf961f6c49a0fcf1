//! From `kvxfer.Limits` to the engine's settings.

use crate::errors;
use kvxfer_engine::AgentConfig;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::time::Duration;

/// Sets every limit that `limits` names.
pub(crate) fn apply(limits: &Bound<'_, PyDict>, config: &mut AgentConfig) -> PyResult<()> {
    for (name, value) in limits {
        let name: String = name.extract()?;
        let seconds = || -> PyResult<Duration> {
            Duration::try_from_secs_f64(value.extract()?)
                .map_err(|e| errors::bad(value.py(), format!("{name}: {e}")))
        };
        let (l, n) = (&mut config.limits, &mut config.node);
        match name.as_str() {
            "connections" => l.connections = value.extract()?,
            "connections_per_address" => l.connections_per_address = value.extract()?,
            "connections_per_peer" => l.connections_per_peer = value.extract()?,
            "handshakes" => l.handshakes = value.extract()?,
            "handshakes_per_address" => l.handshakes_per_address = value.extract()?,
            "handshake_timeout" => l.handshake_timeout = seconds()?,
            "frame_bytes" => l.frame_bytes = value.extract()?,
            "frame_timeout" => l.frame_timeout = seconds()?,
            "unread_bytes" => l.unread_bytes = value.extract()?,
            "requests_per_second" => l.requests_per_second = value.extract()?,
            "registrations" => l.registrations = value.extract()?,
            "peers" => n.peers = value.extract()?,
            "early_grants" => n.early_grants = value.extract()?,
            "early_grants_per_peer" => n.early_grants_per_peer = value.extract()?,
            "early_pages_per_peer" => n.early_pages_per_peer = value.extract()?,
            "tombstones" => n.tombstones = value.extract()?,
            "tombstones_per_peer" => n.tombstones_per_peer = value.extract()?,
            other => return Err(errors::bad(value.py(), format!("there is no limit {other:?}"))),
        }
    }
    Ok(())
}
