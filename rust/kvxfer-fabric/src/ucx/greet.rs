//! Hellos, answers and goodbyes: which of the peer's endpoints may write to us, and through which of ours.

use super::UcxFabric;
use super::link::{Ending, Link, Parked, State, send};
use super::note::{Body, Note};
use super::worker::Endpoint;
use crate::{Completion, EndRole, EpId, FabricError};

/// Hellos kept for endpoints that this side has not made yet; the oldest makes room.
const MAX_PARKED: usize = 256;
/// Endpoints made at most to catch up with a peer's count.
const MAX_CATCH_UP: usize = 8;

impl UcxFabric {
    /// Reads what other fabrics said.
    pub(super) fn read_notes(&mut self) -> bool {
        let mut any = false;
        while let Some(note) = self.worker.take_note() {
            any = true;
            let reply = note.reply.addr();
            let Some(note) = Note::decode(&note.bytes).filter(|n| n.to == self.id) else {
                continue;
            };
            match &note.body {
                Body::Hello(_) => self.hello(note, reply),
                Body::Answer => self.answered(&note),
                Body::Bye => self.dismissed(&note),
            }
        }
        any
    }

    /// A peer has warmed its endpoint and wants to write.
    pub(super) fn hello(&mut self, note: Note, reply: usize) {
        let known: Vec<EpId> = self
            .links
            .iter()
            .filter(|(_, l)| l.peer == note.from && l.end.is_some())
            .map(|(ep, _)| *ep)
            .collect();
        let passive = |l: &Link| l.role == EndRole::Passive;
        if !known.iter().filter_map(|ep| self.links.get(ep)).any(passive) {
            // This side has not decided to be written to (yet).
            self.parked.retain(|p| p.note.from != note.from);
            if self.parked.len() >= MAX_PARKED {
                self.parked.remove(0);
            }
            self.parked.push(Parked { note, reply });
            return;
        }
        let matching = known.iter().copied().find(|ep| {
            self.links.get(ep).and_then(|l| l.end.as_ref()).is_some_and(|e| e.endpoint.raw().addr() == reply)
        });
        let matching = matching.or_else(|| self.catch_up(&known, reply));
        let Some(link) = matching.or(known.first().copied()).and_then(|ep| self.links.get(&ep)) else {
            return;
        };
        let Some(end) = &link.end else {
            return;
        };
        let peer = self.peers.entry(note.from).or_default();
        peer.writes = true;
        peer.hellos.push((note.token, reply));
        match &note.body {
            Body::Hello(names) if !names.is_empty() => peer.transports.extend(names.iter().cloned()),
            _ => peer.leak = Some("the peer does not know which transports it writes through"),
        }
        peer.transports.extend(end.endpoint.transports());
        if matching.is_none() {
            peer.leak = Some(
                "UCX paired the peer's endpoint with one that kvxfer does not hold, as after a connection that was \
                 lost halfway",
            );
        }
        let answer = Note { from: self.id, to: note.from, token: note.token, body: Body::Answer };
        if let Err(error) = send(&mut self.notes_out, &end.endpoint, &answer) {
            tracing::debug!(%error, "no answer to a hello; the peer's connect fails when its endpoint does");
        }
    }

    /// The peer's endpoint is paired with none of ours, because it has made more of them than this side. Makes more
    /// here until UCX hands out the one that it is paired with, which then stands for the link.
    fn catch_up(&mut self, known: &[EpId], reply: usize) -> Option<EpId> {
        let ep = *known.iter().find(|ep| self.links.get(ep).is_some_and(|l| l.role == EndRole::Passive))?;
        for _ in 0..MAX_CATCH_UP {
            let link = self.links.get_mut(&ep)?;
            let mut endpoint = Endpoint::create(&self.worker, &link.address).ok()?;
            let peer = link.peer;
            let found = endpoint.raw().addr() == reply;
            if found {
                // A passive link has posted nothing, so its endpoint can be replaced.
                std::mem::swap(&mut link.end.as_mut()?.endpoint, &mut endpoint);
            }
            self.close(peer, endpoint);
            if found {
                return Some(ep);
            }
        }
        None
    }

    /// Closes an endpoint that carried nothing.
    pub(super) fn close(&mut self, peer: u128, endpoint: Endpoint) {
        let closing = endpoint.close(true);
        self.endings.push(Ending { peer, closing, keys: Vec::new(), dirty: false, flushes: Vec::new() });
    }

    /// Our hello was answered: this side may write.
    fn answered(&mut self, note: &Note) {
        let found = self.links.iter().find(|(_, l)| {
            l.peer == note.from && l.token == note.token && matches!(l.state, State::Greeting)
        });
        let Some((ep, link)) = found else {
            return;
        };
        let (ep, info) = (*ep, self.info(link));
        if let Some(link) = self.links.get_mut(&ep) {
            link.state = State::Open;
            if let Some(end) = &mut link.end {
                end.dirty = false;
            }
            self.out.push(Completion::Connected { ep, info });
        }
    }

    /// The peer closed the endpoint that this link writes to.
    fn dismissed(&mut self, note: &Note) {
        let found = self
            .links
            .iter()
            .find(|(_, l)| l.peer == note.from && l.token == note.token && l.role == EndRole::Active)
            .map(|(ep, _)| *ep);
        if let Some(ep) = found {
            self.break_link(ep, FabricError::Closed("the peer has closed it".into()));
        }
    }
}
