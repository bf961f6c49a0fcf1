//! The reader's side: attaching to a source.

use super::blob::Blob;
use super::copy::{RemotePlace, RemoteRegion};
use super::pool::{Mapping, map_peer};
use super::sock::{self, Received};
use super::wire::{Entry, Hello, PACKET_MAX, Packet, Place};
use super::{os_error, to_usize};
use crate::FabricError;
use std::os::fd::{AsFd, OwnedFd};

/// Packets taken in one call; mapping is not free, and others wait for the thread.
const PACKETS_A_CALL: usize = 8;

/// What an attachment gave.
#[derive(Debug)]
pub(crate) struct Attached {
    pub(crate) regions: Vec<RemoteRegion>,
    /// Each with the descriptor that it is of.
    pub(crate) maps: Vec<(Mapping, OwnedFd)>,
}

/// How far an attachment got.
#[derive(Debug)]
pub(crate) enum Step {
    /// Not there yet.
    Pending,
    /// The source's queue is full: call again soon.
    Again,
    /// Connected; the socket is new and must be watched.
    Dialled,
    /// Done.
    Done(Attached),
}

/// An attachment on its way.
#[derive(Debug)]
pub(crate) struct Attach {
    blob: Blob,
    hello: Hello,
    uid: u32,
    lens: Vec<u64>,
    head: Option<u32>,
    entries: Vec<Entry>,
    /// Bytes of each descriptor that the table reaches.
    needs: Vec<u64>,
    maps: Vec<Option<(Mapping, OwnedFd)>>,
}

fn bad(why: String) -> FabricError {
    FabricError::BadBlob { what: "answer on the shm socket", why }
}

impl Attach {
    pub(crate) fn new(blob: Blob, instance: [u8; 16], uid: u32, lens: &[u64]) -> Self {
        let hello = Hello { token: blob.token, instance };
        Self {
            blob,
            hello,
            uid,
            lens: lens.to_vec(),
            head: None,
            entries: Vec::new(),
            needs: Vec::new(),
            maps: Vec::new(),
        }
    }

    /// Moves along as far as it goes without waiting.
    pub(crate) fn step(&mut self, sock: &mut Option<OwnedFd>, buf: &mut [u8]) -> Result<Step, FabricError> {
        let Some(fd) = sock else {
            let Some(fd) = sock::connect(&self.blob.name)? else { return Ok(Step::Again) };
            self.greet(&fd)?;
            *sock = Some(fd);
            return Ok(Step::Dialled);
        };
        for _ in 0..PACKETS_A_CALL {
            let mut fds = Vec::new();
            let got = sock::recv(fd, buf, &mut fds).map_err(|e| {
                os_error("recvmsg", &format!("from the source: {e}; is the limit of open files too low?"))
            })?;
            match got {
                Received::Nothing => return Ok(Step::Pending),
                Received::End => {
                    return Err(FabricError::Closed(format!(
                        "process {} closed the shm socket before it had answered",
                        self.blob.process.pid
                    )));
                }
                Received::Packet(n) => {
                    let bytes = buf.get(..n).ok_or_else(|| bad(format!("a packet of {n} bytes")))?;
                    if self.packet(Packet::decode(bytes)?, fds)? {
                        return Ok(Step::Done(self.finish()?));
                    }
                }
            }
        }
        Ok(Step::Pending)
    }

    /// Checks who listens there, then shows the token.
    fn greet(&self, fd: &OwnedFd) -> Result<(), FabricError> {
        let peer = sock::peer(fd)?;
        if peer.pid != self.blob.process.pid || (peer.uid != self.uid && peer.uid != 0) {
            return Err(bad(format!(
                "process {} of user {} listens, but process {} of user {} was expected",
                peer.pid, peer.uid, self.blob.process.pid, self.uid
            )));
        }
        match sock::send(fd, &self.hello.encode(), &[]) {
            Ok(true) => Ok(()),
            Ok(false) => Err(os_error("sendmsg", "no room for the greeting")),
            Err(e) => Err(os_error("sendmsg", &format!("the greeting: {e}"))),
        }
    }

    /// Takes a packet in; returns whether it was the last one.
    fn packet(&mut self, packet: Packet, fds: Vec<OwnedFd>) -> Result<bool, FabricError> {
        let carries = matches!(packet, Packet::Fds(_));
        if !carries && !fds.is_empty() {
            return Err(bad(format!("{} descriptors where none belong", fds.len())));
        }
        match (packet, self.head) {
            (Packet::Refused(why), _) => Err(FabricError::Closed(format!(
                "process {} refused this reader: {}",
                self.blob.process.pid,
                why.text()
            ))),
            (Packet::Head { regions, fds }, None) => {
                let expected = self.lens.len();
                if to_usize(u64::from(regions), "count")? != expected {
                    return Err(bad(format!("{regions} regions, but the peer announced {expected}")));
                }
                if fds > regions {
                    return Err(bad(format!("{fds} descriptors for {regions} regions")));
                }
                self.head = Some(fds);
                self.needs = vec![0; to_usize(u64::from(fds), "count")?];
                Ok(self.complete())
            }
            (Packet::Table(entries), Some(fds)) => {
                for entry in entries {
                    self.entry(entry, fds)?;
                }
                Ok(self.complete())
            }
            (Packet::Fds(n), Some(_)) => {
                if self.entries.len() != self.lens.len() {
                    return Err(bad("descriptors before the table is whole".to_owned()));
                }
                if to_usize(u64::from(n), "count")? != fds.len() {
                    return Err(bad(format!("{} descriptors came, {n} were announced", fds.len())));
                }
                for fd in fds {
                    let need = *self.needs.get(self.maps.len()).ok_or_else(|| {
                        bad(format!("more than the {} descriptors announced", self.needs.len()))
                    })?;
                    self.maps.push(if need == 0 { None } else { Some((map_peer(fd.as_fd(), need)?, fd)) });
                }
                Ok(self.complete())
            }
            (Packet::Head { .. }, Some(_)) => Err(bad("a second head".to_owned())),
            (Packet::Table(_) | Packet::Fds(_), None) => Err(bad("no head".to_owned())),
        }
    }

    fn entry(&mut self, entry: Entry, fds: u32) -> Result<(), FabricError> {
        let index = self.entries.len();
        let expected = *self
            .lens
            .get(index)
            .ok_or_else(|| bad(format!("more regions than the {} announced", self.lens.len())))?;
        if entry.len != expected {
            return Err(bad(format!(
                "region {index} has {} bytes, but {expected} were announced",
                entry.len
            )));
        }
        if let Place::File { fd, offset } = entry.place {
            let end = offset.checked_add(entry.len).ok_or_else(|| bad(format!("region {index} wraps")))?;
            let need = self
                .needs
                .get_mut(to_usize(u64::from(fd), "descriptor")?)
                .ok_or_else(|| bad(format!("region {index} is in descriptor {fd} of {fds}")))?;
            *need = end.max(*need);
        }
        self.entries.push(entry);
        Ok(())
    }

    fn complete(&self) -> bool {
        self.head.is_some() && self.entries.len() == self.lens.len() && self.maps.len() == self.needs.len()
    }

    fn finish(&mut self) -> Result<Attached, FabricError> {
        let mut regions = Vec::with_capacity(self.entries.len());
        for e in &self.entries {
            let place = match e.place {
                Place::Process { addr } => RemotePlace::Process { addr },
                Place::File { fd, offset } => {
                    let map = self.maps.get(to_usize(u64::from(fd), "descriptor")?).and_then(Option::as_ref);
                    match map {
                        Some((map, _)) => {
                            RemotePlace::Mapped { addr: map.addr() + to_usize(offset, "offset")? }
                        }
                        // No byte of this descriptor is in any region, so none can be asked for.
                        None => RemotePlace::Mapped { addr: std::ptr::dangling::<u8>().addr() },
                    }
                }
            };
            regions.push(RemoteRegion { len: e.len, place });
        }
        Ok(Attached { regions, maps: self.maps.drain(..).flatten().collect() })
    }
}

/// A buffer for [`Attach::step`].
pub(crate) fn packet_buffer() -> Vec<u8> {
    vec![0; PACKET_MAX]
}

#[cfg(test)]
mod tests {
    use super::super::blob::ProcessKey;
    use super::super::host::HostId;
    use super::super::{PoolOptions, ShmPool};
    use super::*;

    fn attach(lens: &[u64]) -> Attach {
        let blob = Blob {
            host: HostId { boot_id: [0; 16], pid_ns: 1, net_ns: 1, uid: 0 },
            process: ProcessKey { pid: 1, start: 1, instance: [0; 16] },
            token: [0; 32],
            name: b"x".to_vec(),
        };
        Attach::new(blob, [0; 16], 0, lens)
    }

    fn file(fd: u32, offset: u64, len: u64) -> Entry {
        Entry { len, place: Place::File { fd, offset } }
    }

    fn pool_fd(bytes: u64) -> OwnedFd {
        let pool = ShmPool::alloc_with(bytes, &PoolOptions::default()).unwrap();
        pool.fd().try_clone_to_owned().unwrap()
    }

    type Answer = Vec<(Packet, Vec<OwnedFd>)>;

    /// Feeds a hostile source's packets; returns what the reader says to the last.
    fn last_error(lens: &[u64], packets: Answer) -> String {
        let mut a = attach(lens);
        let n = packets.len();
        for (i, (packet, fds)) in packets.into_iter().enumerate() {
            match a.packet(packet, fds) {
                Ok(done) => assert!(!done && i + 1 < n, "accepted"),
                Err(e) => {
                    assert_eq!(i + 1, n, "refused too early: {e}");
                    return e.to_string();
                }
            }
        }
        panic!("accepted")
    }

    #[test]
    fn hostile_sources_are_refused() {
        let head = |regions, fds| (Packet::Head { regions, fds }, vec![]);
        let table = |e: Vec<Entry>| (Packet::Table(e), vec![]);
        let cases: Vec<(&str, Vec<u64>, Answer)> = vec![
            ("announced 1", vec![8], vec![head(2, 0)]),
            ("2 descriptors for 1", vec![8], vec![head(1, 2)]),
            ("second head", vec![8], vec![head(1, 1), head(1, 1)]),
            ("no head", vec![8], vec![table(vec![file(0, 0, 8)])]),
            ("9 bytes, but 8", vec![8], vec![head(1, 1), table(vec![file(0, 0, 9)])]),
            ("descriptor 1 of 1", vec![8], vec![head(1, 1), table(vec![file(1, 0, 8)])]),
            ("wraps", vec![8], vec![head(1, 1), table(vec![file(0, u64::MAX, 8)])]),
            ("more regions", vec![8], vec![head(1, 1), table(vec![file(0, 0, 8), file(0, 0, 8)])]),
            ("before the table", vec![8], vec![head(1, 1), (Packet::Fds(1), vec![pool_fd(8)])]),
            (
                "0 descriptors came, 1",
                vec![8],
                vec![head(1, 1), table(vec![file(0, 0, 8)]), (Packet::Fds(1), vec![])],
            ),
            (
                "more than the 1",
                vec![8],
                vec![head(1, 1), table(vec![file(0, 0, 8)]), (Packet::Fds(2), vec![pool_fd(8), pool_fd(8)])],
            ),
            ("where none belong", vec![8], vec![(Packet::Head { regions: 1, fds: 1 }, vec![pool_fd(8)])]),
            (
                "but the peer's table needs 5000",
                vec![5000],
                vec![head(1, 1), table(vec![file(0, 0, 5000)]), (Packet::Fds(1), vec![pool_fd(4096)])],
            ),
        ];
        for (text, lens, packets) in cases {
            let error = last_error(&lens, packets);
            assert!(error.contains(text), "{text} is not in {error}");
        }
    }

    #[test]
    fn regions_share_a_descriptor() {
        let mut a = attach(&[100, 200, 0]);
        assert!(!a.packet(Packet::Head { regions: 3, fds: 1 }, vec![]).unwrap());
        let table =
            vec![file(0, 0, 100), file(0, 4096, 200), Entry { len: 0, place: Place::Process { addr: 0 } }];
        assert!(!a.packet(Packet::Table(table), vec![]).unwrap());
        assert!(a.packet(Packet::Fds(1), vec![pool_fd(8192)]).unwrap());
        let got = a.finish().unwrap();
        assert_eq!((got.regions.len(), got.maps.len()), (3, 1));
        match (got.regions[0].place, got.regions[1].place) {
            (RemotePlace::Mapped { addr: a }, RemotePlace::Mapped { addr: b }) => assert_eq!(b - a, 4096),
            other => panic!("{other:?}"),
        }
    }
}
