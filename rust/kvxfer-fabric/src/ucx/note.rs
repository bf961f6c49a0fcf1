//! The notes that fabrics send each other over UCX itself when an endpoint is made and when it goes.
//!
//! The side that will write says hello once it has warmed the endpoint, and writes only after the other side's
//! answer. The hello comes with the endpoint through which that peer's writes arrive, which the receiver compares
//! with the endpoints that it would close for a fence: UCX pairs endpoints by counting, and a connection that was
//! lost halfway leaves the two counts apart. A receiver that closes its endpoint says so: over TCP, UCX drops what
//! still comes for it in silence, and the sender's flush would never end.

/// The id of our active messages.
pub(super) const ID: u16 = 1;

const MAGIC: [u8; 4] = *b"kxHI";
const HELLO: u8 = 0;
const ANSWER: u8 = 1;
const BYE: u8 = 2;
/// Bytes of transport names at most.
const MAX_NAMES: usize = 512;

/// What a note says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Body {
    /// I have warmed this endpoint and write through these transports.
    Hello(Vec<String>),
    /// You may write.
    Answer,
    /// What you write through this endpoint is dropped from now on.
    Bye,
}

/// A note.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Note {
    /// Fabric that sent it.
    pub(super) from: u128,
    /// Fabric that it is for.
    pub(super) to: u128,
    /// Names the endpoint on the side that said hello.
    pub(super) token: u64,
    pub(super) body: Body,
}

impl Note {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.push(super::blob::FORMAT);
        let (kind, mut names) = match &self.body {
            Body::Hello(names) => (HELLO, names.join(",")),
            Body::Answer => (ANSWER, String::new()),
            Body::Bye => (BYE, String::new()),
        };
        out.push(kind);
        out.extend_from_slice(&self.from.to_le_bytes());
        out.extend_from_slice(&self.to.to_le_bytes());
        out.extend_from_slice(&self.token.to_le_bytes());
        if names.len() > MAX_NAMES {
            // What is not said is taken as unknown, and unknown means that there is no fence.
            names.clear();
        }
        out.extend_from_slice(names.as_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(&MAGIC)?;
        let ([format, kind], rest) = rest.split_first_chunk::<2>()?;
        let (from, rest) = rest.split_first_chunk::<16>()?;
        let (to, rest) = rest.split_first_chunk::<16>()?;
        let (token, names) = rest.split_first_chunk::<8>()?;
        if *format != super::blob::FORMAT || names.len() > MAX_NAMES {
            return None;
        }
        let names = std::str::from_utf8(names).ok()?;
        let body = match *kind {
            HELLO => Body::Hello(names.split(',').filter(|n| !n.is_empty()).map(str::to_owned).collect()),
            ANSWER if names.is_empty() => Body::Answer,
            BYE if names.is_empty() => Body::Bye,
            _ => return None,
        };
        Some(Self {
            from: u128::from_le_bytes(*from),
            to: u128::from_le_bytes(*to),
            token: u64::from_le_bytes(*token),
            body,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_goes_in_comes_out() {
        let hello = |names: &[&str]| Body::Hello(names.iter().map(|n| (*n).to_owned()).collect());
        for body in [Body::Answer, Body::Bye, hello(&[]), hello(&["posix", "tcp"])] {
            let note = Note { from: 1, to: u128::MAX, token: 3, body };
            assert_eq!(Note::decode(&note.encode()), Some(note));
        }
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(kind in any::<u8>(), bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Note::decode(&bytes);
            let framed = [&MAGIC[..], &[super::super::blob::FORMAT, kind], &bytes].concat();
            if let Some(note) = Note::decode(&framed) {
                prop_assert!(bytes.len() >= 40 && kind <= BYE, "{:?}", note);
            }
        }
    }
}
