//! Where rooms come from: directories, their ranks, and who of them owes this rank what.

use super::{Action, Direction, Node, PeerKey, RankInfo, Source};
use crate::error::{Reason, ReasonKind};
use crate::ids::{Room, Time};
use crate::msg::{Msg, RoomFailed};
use crate::plan;
use std::collections::{BTreeMap, BTreeSet};

/// A rank of a source, and the layers that it owes this rank.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct SourceRank {
    pub(super) key: PeerKey,
    pub(super) owes: Option<(u32, u32)>,
}

/// What is known of one source.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct SourceState {
    pub(super) ranks: Option<Vec<SourceRank>>,
    /// Rooms that wait for the directory's answer.
    pub(super) waiting: BTreeSet<Room>,
    /// Rooms that ended before it; the ranks are told once they are known.
    ended: Vec<(Room, Reason)>,
    asked: bool,
}

impl SourceState {
    /// Whether anything is known of the source, or waits for it.
    fn is_of_use(&self) -> bool {
        self.ranks.is_some() || self.asked || !self.waiting.is_empty()
    }
}

/// Why a directory is still asked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Resolving {
    /// Rooms wait for its answer: keep trying.
    RoomsWait,
    /// Rooms that have ended are to be told to its ranks: worth a few tries.
    OnlyToTell,
}

/// Ended rooms remembered per unresolved source.
const ENDED_LIMIT: usize = 4096;

impl Node {
    /// Grants the room's pages to every rank of its source, now or when the directory has answered.
    pub(super) fn resolve_room(&mut self, now: Time, room: Room, source: &Source) {
        let state = self.sources.entry(source.clone()).or_default();
        if let Some(ranks) = state.ranks.clone() {
            self.make_grants(now, room, &ranks);
            return;
        }
        state.waiting.insert(room);
        if !std::mem::replace(&mut state.asked, true) {
            self.actions.push_back(Action::Resolve(source.clone()));
        }
    }

    /// A room ended while its source was unknown.
    pub(super) fn unresolve_room(&mut self, room: Room, source: &Source, reason: &Reason) {
        if let Some(state) = self.sources.get_mut(source)
            && state.waiting.remove(&room)
            && state.ended.len() < ENDED_LIMIT
        {
            state.ended.push((room, reason.clone()));
        }
    }

    /// A room failed before a grant for it was made: ranks that can be told are told.
    pub(super) fn tell_ranks(&mut self, now: Time, room: Room, ranks: &[SourceRank], reason: &Reason) {
        for rank in ranks {
            if self.peers.get(&rank.key).is_none_or(|p| p.unusable().is_none()) {
                self.queue(now, rank.key, Msg::RoomFailed(RoomFailed { room, reason: reason.clone() }));
            } else {
                self.tell_later(rank.key, room, reason);
            }
        }
    }

    /// The same for a room that was refused: its source need not be known yet.
    pub(super) fn tell_source(&mut self, now: Time, room: Room, source: &Source, reason: &Reason) {
        let state = self.sources.entry(source.clone()).or_default();
        if let Some(ranks) = state.ranks.clone() {
            self.tell_ranks(now, room, &ranks, reason);
        } else if state.ended.len() < ENDED_LIMIT {
            state.ended.push((room, reason.clone()));
            if !std::mem::replace(&mut state.asked, true) {
                self.actions.push_back(Action::Resolve(source.clone()));
            }
        }
    }

    /// Why this directory is still to be asked, if it is.
    #[must_use]
    pub fn resolving(&self, source: &Source) -> Option<Resolving> {
        let state = self.sources.get(source).filter(|s| s.asked)?;
        match (state.waiting.is_empty(), state.ended.is_empty()) {
            (false, _) => Some(Resolving::RoomsWait),
            (true, false) => Some(Resolving::OnlyToTell),
            (true, true) => None,
        }
    }

    /// Forgets an unanswered question; the next room asks again.
    pub fn handle_resolve_stopped(&mut self, source: &Source) {
        if let Some(state) = self.sources.get_mut(source) {
            state.asked = false;
            state.ended.clear();
            self.sources.retain(|_, s| s.is_of_use());
        }
    }

    /// The directory answered: every rank of the source in the order `pp_rank * tp_size + tp_rank`, or why it cannot.
    pub fn handle_resolved(&mut self, now: Time, source: &Source, answer: Result<Vec<RankInfo>, Reason>) {
        let Some(state) = self.sources.get_mut(source) else { return };
        state.asked = false;
        let waiting = std::mem::take(&mut state.waiting);
        let ended = std::mem::take(&mut state.ended);
        let ranks = answer.and_then(|ranks| self.owing_ranks(source, &ranks));
        match ranks {
            Ok(ranks) => {
                if let Some(state) = self.sources.get_mut(source) {
                    state.ranks = Some(ranks.clone());
                }
                for (room, reason) in ended {
                    self.tell_ranks(now, room, &ranks, &reason);
                }
                for room in waiting {
                    self.make_grants(now, room, &ranks);
                }
            }
            Err(reason) => {
                for room in waiting {
                    self.fail_inbound(now, room, reason.clone());
                }
                self.sources.retain(|_, s| s.is_of_use());
            }
        }
    }

    fn owing_ranks(&self, source: &Source, ranks: &[RankInfo]) -> Result<Vec<SourceRank>, Reason> {
        let Some(first) = ranks.first() else {
            return Err(Reason::new(
                ReasonKind::PeerLost,
                format!("the directory at {} knows no rank", source.address),
            ));
        };
        let shard = first.side.shard;
        let owes = plan::sources(&first.side.groups, shard.tp_size, shard.pp_size, &self.side);
        // Ranks that do not fit are granted to all the same: the handshake then names the clash on both sides.
        let owes = owes.unwrap_or_else(|_| vec![Some(0..u32::MAX); ranks.len()]);
        if owes.len() != ranks.len() {
            return Err(Reason::new(
                ReasonKind::ProtocolError,
                format!("the directory at {} named {} ranks of {}", source.address, ranks.len(), owes.len()),
            ));
        }
        let mut seen = BTreeMap::new();
        for (i, rank) in ranks.iter().enumerate() {
            if let Some(before) = seen.insert(rank.incarnation, i) {
                // Two grants of one room to one peer could not be told apart.
                let text = format!(
                    "the directory at {} named incarnation {} both as rank {before} and as rank {i}",
                    source.address, rank.incarnation
                );
                return Err(Reason::new(ReasonKind::ProtocolError, text));
            }
        }
        Ok(ranks
            .iter()
            .zip(owes)
            .map(|(rank, owes)| SourceRank {
                key: PeerKey { incarnation: rank.incarnation, direction: Direction::WeGrant },
                owes: owes.map(|r| (r.start, r.end)),
            })
            .collect())
    }

    /// What was known of every source with this rank is void (it restarted): the next room asks again.
    pub(super) fn forget_sources_of(&mut self, key: PeerKey) {
        self.sources.retain(|_, s| {
            if s.ranks.as_ref().is_some_and(|ranks| ranks.iter().any(|r| r.key == key)) {
                s.ranks = None;
            }
            s.is_of_use()
        });
    }
}
