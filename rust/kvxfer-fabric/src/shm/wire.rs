//! Messages on the Unix socket. It keeps message boundaries (`SOCK_SEQPACKET`), so each message is one packet.
//!
//! Reader to source: one [`Hello`]. Source to reader: a refusal, or a head, then the region table in order, then
//! the descriptors in order, each in as many packets as it takes.

use super::blob::{Reader, Token};
use crate::FabricError;

const MAGIC: [u8; 4] = *b"kvsa";
const VERSION: u16 = 1;
/// Bytes of a [`Hello`].
pub(crate) const HELLO_LEN: usize = 4 + 2 + 32 + 16;
/// Entries in a table packet.
pub(crate) const ENTRIES_A_PACKET: usize = 512;
/// Descriptors in a packet; the kernel takes 253.
pub(crate) const FDS_A_PACKET: usize = 250;
/// Bytes of the largest packet from the source.
pub(crate) const PACKET_MAX: usize = 16 + ENTRIES_A_PACKET * ENTRY_LEN;
const ENTRY_LEN: usize = 1 + 8 + 8 + 4;

/// The reader shows its token and says which fabric it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    pub(crate) token: Token,
    pub(crate) instance: [u8; 16],
}

impl Hello {
    pub(crate) fn encode(&self) -> [u8; HELLO_LEN] {
        let mut out = [0u8; HELLO_LEN];
        out[..4].copy_from_slice(&MAGIC);
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6..38].copy_from_slice(&self.token);
        out[38..].copy_from_slice(&self.instance);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader(bytes);
        if r.array::<4>()? != MAGIC || r.array().map(u16::from_le_bytes)? != VERSION {
            return None;
        }
        let hello = Self { token: r.array()?, instance: r.array()? };
        r.0.is_empty().then_some(hello)
    }
}

/// Why the source refuses a reader.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Refusal {
    Token = 1,
    User = 2,
    Ptracer = 3,
    Hello = 4,
}

impl Refusal {
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [Self::Token, Self::User, Self::Ptracer, Self::Hello].into_iter().find(|r| *r as u8 == code)
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Token => {
                "the token is unknown, was used already, or is too old; every session needs a fresh address"
            }
            Self::User => "only processes of the same user, or of root, may read it",
            Self::Ptracer => {
                "Yama (kernel.yama.ptrace_scope=1) lets one process at a time read memory that the engine \
                 allocated, and another reader has that place; use kvxfer.alloc memory, \
                 ShmOptions::allow_any_ptracer, or the ucx fabric over TCP"
            }
            Self::Hello => "it was not understood; are both sides the same version of kvxfer?",
        }
    }
}

/// Where a region's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// In the memfd with this number, from this offset on.
    File { fd: u32, offset: u64 },
    /// At this address of the source's process.
    Process { addr: u64 },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Entry {
    pub(crate) len: u64,
    pub(crate) place: Place,
}

/// A packet from the source, without its descriptors.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Packet {
    Refused(Refusal),
    Head {
        regions: u32,
        fds: u32,
    },
    Table(Vec<Entry>),
    /// This many descriptors come with it.
    Fds(u32),
}

impl Packet {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(32);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        match self {
            Self::Refused(why) => out.extend_from_slice(&[1, *why as u8]),
            Self::Head { regions, fds } => {
                out.push(2);
                out.extend_from_slice(&regions.to_le_bytes());
                out.extend_from_slice(&fds.to_le_bytes());
            }
            Self::Table(entries) => {
                out.push(3);
                for e in entries {
                    let (kind, at, fd) = match e.place {
                        Place::File { fd, offset } => (0u8, offset, fd),
                        Place::Process { addr } => (1u8, addr, 0),
                    };
                    out.push(kind);
                    out.extend_from_slice(&e.len.to_le_bytes());
                    out.extend_from_slice(&at.to_le_bytes());
                    out.extend_from_slice(&fd.to_le_bytes());
                }
            }
            Self::Fds(n) => {
                out.push(4);
                out.extend_from_slice(&n.to_le_bytes());
            }
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, FabricError> {
        let bad = |why: &str| FabricError::BadBlob { what: "answer on the shm socket", why: why.to_owned() };
        let mut r = Reader(bytes);
        if r.array::<4>() != Some(MAGIC) || r.array().map(u16::from_le_bytes) != Some(VERSION) {
            return Err(bad("it is of another program or version"));
        }
        let short = || bad("a packet is cut short");
        let packet = match r.u8().ok_or_else(short)? {
            1 => {
                let code = r.u8().ok_or_else(short)?;
                Self::Refused(Refusal::from_code(code).ok_or_else(|| bad("unknown refusal"))?)
            }
            2 => Self::Head { regions: r.u32().ok_or_else(short)?, fds: r.u32().ok_or_else(short)? },
            3 => {
                if r.0.is_empty() || r.0.len() % ENTRY_LEN != 0 || r.0.len() / ENTRY_LEN > ENTRIES_A_PACKET {
                    return Err(bad("a table packet of odd length"));
                }
                let mut entries = Vec::with_capacity(r.0.len() / ENTRY_LEN);
                while !r.0.is_empty() {
                    entries.push(entry(&mut r).ok_or_else(|| bad("a bad table entry"))?);
                }
                Self::Table(entries)
            }
            4 => Self::Fds(r.u32().ok_or_else(short)?),
            _ => return Err(bad("an unknown packet")),
        };
        if r.0.is_empty() { Ok(packet) } else { Err(bad("a packet is too long")) }
    }
}

fn entry(r: &mut Reader<'_>) -> Option<Entry> {
    let (kind, len, at, fd) = (r.u8()?, r.u64()?, r.u64()?, r.u32()?);
    // No region wraps round the end of a file or of the address space.
    at.checked_add(len)?;
    let place = match kind {
        0 => Place::File { fd, offset: at },
        1 if fd == 0 => Place::Process { addr: at },
        _ => return None,
    };
    Some(Entry { len, place })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entries() -> impl Strategy<Value = Entry> {
        (any::<bool>(), 0u64..1 << 62, 0u64..1 << 63, any::<u32>()).prop_map(|(file, len, at, fd)| Entry {
            len,
            place: if file { Place::File { fd, offset: at } } else { Place::Process { addr: at } },
        })
    }

    fn packets() -> impl Strategy<Value = Packet> {
        prop_oneof![
            (1u8..=4).prop_map(|c| Packet::Refused(Refusal::from_code(c).unwrap())),
            any::<(u32, u32)>().prop_map(|(regions, fds)| Packet::Head { regions, fds }),
            proptest::collection::vec(entries(), 1..ENTRIES_A_PACKET).prop_map(Packet::Table),
            any::<u32>().prop_map(Packet::Fds),
        ]
    }

    proptest! {
        #[test]
        fn round_trip(p in packets()) {
            let bytes = p.encode();
            prop_assert!(bytes.len() <= PACKET_MAX);
            prop_assert_eq!(Packet::decode(&bytes).unwrap(), p);
            prop_assert!(Packet::decode(&bytes[..bytes.len() - 1]).is_err());
        }

        #[test]
        fn hostile_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), valid in any::<bool>()) {
            if valid && bytes.len() > 6 {
                bytes[..4].copy_from_slice(&MAGIC);
                bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
            }
            if let Ok(p) = Packet::decode(&bytes) {
                prop_assert_eq!(p.encode(), bytes.clone());
            }
            if let Some(h) = Hello::decode(&bytes) {
                prop_assert_eq!(h.encode().to_vec(), bytes);
            }
        }

        #[test]
        fn hellos(token in any::<Token>(), instance in any::<[u8; 16]>()) {
            let h = Hello { token, instance };
            prop_assert_eq!(Hello::decode(&h.encode()), Some(h));
            prop_assert_eq!(Hello::decode(&h.encode()[..HELLO_LEN - 1]), None);
        }
    }

    #[test]
    fn regions_that_wrap_are_refused() {
        let p = Packet::Table(vec![Entry { len: 2, place: Place::Process { addr: u64::MAX } }]);
        assert!(Packet::decode(&p.encode()).is_err());
    }
}
