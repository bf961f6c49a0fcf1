//! What closing our endpoint promises, for each of UCX's transports.

use crate::FabricError;
use std::collections::BTreeSet;

/// What a sender names beside `tcp` unless its user has turned TCP's own put off: such writes go straight from the
/// socket into memory, and closing the endpoint does not close the socket, which UCX keeps for receiving (1.22: a
/// megabyte landed after the close). Without it puts are active messages, which the receiver's UCX looks up by the
/// endpoint's number, never used again, and drops when that is closed; but they can take the receiver's process down
/// (docs/ucx-notes.md).
pub(super) const TCP_PUT: &str = "tcp_put";

/// Whether nothing lands any more once our FORCE close has completed; `Err` says why not.
fn closes_the_way(transport: &str) -> Result<(), &'static str> {
    match transport {
        "tcp" => Ok(()),
        TCP_PUT => Err("UCX's own put over TCP passes a closed endpoint by"),
        // The queue pair is destroyed, and the adapter drops what arrives for it.
        "rc_verbs" | "rc_mlx5" => Ok(()),
        "dc_mlx5" => Err("its target queue is shared by every peer of the interface"),
        "posix" | "sysv" | "xpmem" | "knem" => Err("the peer has our memory mapped and writes it by itself"),
        "cma" => Err("the peer writes our memory by a system call of its own"),
        "cuda_ipc" => Err("the peer has our device memory mapped and writes it by itself"),
        _ => Err("kvxfer has no proof for this transport"),
    }
}

/// Whether a sender that names these transports tells the receiver that it may write by itself what it has mapped: then
/// [`verdict`] promises nothing, whichever of them the bytes take.
pub(super) fn tells_of_mappings(transports: &[String]) -> bool {
    transports.is_empty() || transports.iter().any(|t| t == "posix" || t == "sysv")
}

/// The promise for a peer that writes through these transports.
pub(super) fn verdict(transports: &BTreeSet<String>) -> Result<(), FabricError> {
    if transports.is_empty() {
        return Err(FabricError::NoFence {
            transport: "unknown".into(),
            why: "UCX does not say which transports the endpoint uses".into(),
        });
    }
    let weak: Vec<_> =
        transports.iter().filter_map(|t| closes_the_way(t).err().map(|why| (t.as_str(), why))).collect();
    if let Some((_, why)) = weak.first() {
        // All of them: who waits for the peer's own word treats TCP differently from memory that it maps.
        let transport = weak.iter().map(|(t, _)| *t).collect::<Vec<_>>().join(",");
        let why = format!("{why}; only the peer's death or our own end stops it");
        return Err(FabricError::NoFence { transport, why });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(names: &[&str]) -> Result<(), FabricError> {
        verdict(&names.iter().map(|n| (*n).to_owned()).collect())
    }

    #[test]
    fn every_weak_transport_is_named() {
        let err = of(&["posix", "rc_verbs", "tcp_put"]).unwrap_err();
        assert!(
            matches!(err, FabricError::NoFence { ref transport, .. } if transport == "posix,tcp_put"),
            "{err}"
        );
    }

    #[test]
    fn who_may_write_mapped_memory_has_no_fence() {
        for names in [&[][..], &["posix"], &["sysv", "tcp"], &["posix", "rc_mlx5", "tcp"]] {
            let owned: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
            assert!(tells_of_mappings(&owned) && of(names).is_err(), "{names:?}");
        }
        for names in [&["tcp"][..], &["rc_mlx5", "tcp"], &["tcp", "xpmem"], &["cuda_ipc", "tcp"]] {
            let owned: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
            assert!(!tells_of_mappings(&owned), "{names:?}");
        }
    }

    #[test]
    fn one_weak_transport_spoils_the_fence() {
        assert_eq!(of(&["tcp"]), Ok(()));
        assert_eq!(of(&["rc_mlx5", "tcp"]), Ok(()));
        for name in ["posix", "sysv", "cma", "dc_mlx5", "ud_verbs", "cuda_ipc", "tcp_put", "something_new"] {
            let err = of(&["tcp", name]).expect_err(name);
            assert!(matches!(err, FabricError::NoFence { ref transport, .. } if transport == name), "{err}");
        }
        assert!(of(&[]).is_err());
    }
}
