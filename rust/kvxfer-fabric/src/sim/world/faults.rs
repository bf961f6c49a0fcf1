//! How writes end, and what can go wrong.

use super::{Event, Life, Phase, Status, Where, World};
use crate::sim::{Landed, NodeId};
use crate::{Completion, EndRole, EpId, FabricError};
use std::collections::BTreeMap;

impl World {
    /// Ends a write: its bytes land, or it is lost.
    pub(super) fn finish(&mut self, id: u64, lands: bool) {
        let Some(write) = self.writes.remove(&id) else { return };
        if let Some(key) = write.key {
            self.events.remove(&key);
        }
        let Some(link) = self.links.get(&write.link) else { return };
        let (from, to, active) = (link.from, link.to, link.active);
        let p = write.piece;
        let bytes = write.taken.or_else(|| {
            let whole = self.alive(from).is_some();
            whole.then(|| self.slice(from.0, p.src_region, p.src_off, p.len).map(<[u8]>::to_vec)).flatten()
        });
        let landed = match bytes {
            Some(bytes) if lands && self.alive(to).is_some() => {
                self.store(to.0, p.dst_region, p.dst_off, &bytes).is_ok()
            }
            _ => false,
        };
        if landed {
            self.trace.push(Landed {
                at_us: self.now_us,
                from: from.0,
                from_life: from.1,
                to: to.0,
                to_life: to.1,
                region: p.dst_region,
                offset: p.dst_off,
                len: p.len,
            });
        }
        if let Some(link) = self.links.get_mut(&write.link) {
            link.outstanding.remove(&id);
            if !landed {
                link.lost.insert(id);
            }
        }
        self.check_flushes(active);
        self.forget_links();
    }

    /// Lands or loses all that is under way on a link, as chance has it, and lets nothing more through.
    pub(super) fn close_link(&mut self, link: u64) {
        let Some(l) = self.links.get_mut(&link) else { return };
        l.closed = true;
        for id in l.outstanding.clone() {
            let lands = self.rng.coin();
            self.finish(id, lands);
        }
    }

    pub(in crate::sim) fn break_endpoint(&mut self, node: NodeId, ep: u32) {
        let Some(end) = self.node(node).and_then(|n| n.ends.get(&ep)) else { return };
        let link = end.link;
        let mut ends = vec![Where { node, ep, uid: end.uid }];
        if let Some((id, l)) = link.and_then(|id| Some((id, self.links.get(&id)?))) {
            ends = vec![l.active, l.passive];
            let ids: Vec<u64> = l.outstanding.iter().copied().collect();
            self.lose_some(id, &ids);
        }
        for at in ends {
            let error = FabricError::Closed("the connection broke".to_owned());
            self.schedule(self.config.notice_delay_us, Event::Broken(at, error));
        }
    }

    /// Loses some writes; without reordering, a tail of them.
    fn lose_some(&mut self, link: u64, ids: &[u64]) {
        let mut gone = false;
        for id in ids {
            let lost = self.rng.coin();
            gone = lost || (gone && !self.config.reorder);
            if gone && self.writes.get(id).is_some_and(|w| w.link == link) {
                self.finish(*id, false);
            }
        }
    }

    fn writes_from(&self, who: Life) -> BTreeMap<u64, Vec<u64>> {
        let from_here = self.links.iter().filter(|(_, l)| l.from == who);
        from_here.map(|(id, l)| (*id, l.outstanding.iter().copied().collect())).collect()
    }

    pub(in crate::sim) fn stop(&mut self, node: NodeId) {
        let who = (node, self.life(node));
        match self.alive(who) {
            Some(n) if n.status == Status::Runs => n.status = Status::Stopped,
            _ => return,
        }
        for ids in self.writes_from(who).into_values() {
            let mut held = false;
            for id in ids {
                let hold = self.rng.coin();
                held = hold || (held && !self.config.reorder);
                if held && let Some(key) = self.writes.get_mut(&id).and_then(|w| w.key.take()) {
                    self.events.remove(&key);
                }
            }
        }
    }

    pub(in crate::sim) fn resume(&mut self, node: NodeId) {
        let who = (node, self.life(node));
        match self.alive(who) {
            Some(n) if n.status == Status::Stopped => n.status = Status::Runs,
            _ => return,
        }
        self.release_held(who);
        self.wake_active(who);
    }

    fn release_held(&mut self, who: Life) {
        for ids in self.writes_from(who).into_values() {
            for id in ids {
                if self.writes.get(&id).is_some_and(|w| w.key.is_none()) {
                    self.fly(id);
                }
            }
        }
    }

    /// The adapter has read these writes' bytes, and looks at their source no more.
    pub(super) fn take_bytes(&mut self, node: NodeId, ids: &[u64]) {
        for id in ids {
            if let Some(p) = self.writes.get(id).filter(|w| w.taken.is_none()).map(|w| w.piece) {
                let bytes = self.slice(node, p.src_region, p.src_off, p.len).map(<[u8]>::to_vec);
                if let Some(w) = self.writes.get_mut(id) {
                    w.taken = bytes;
                }
            }
        }
    }

    pub(in crate::sim) fn kill(&mut self, node: NodeId) {
        let who = (node, self.life(node));
        if self.alive(who).is_none() {
            return;
        }
        // What is not lost was read by the adapter already, and outlives the process.
        for (link, ids) in self.writes_from(who) {
            self.lose_some(link, &ids);
        }
        let left: Vec<u64> = self.writes_from(who).into_values().flatten().collect();
        self.take_bytes(node, &left);
        self.release_held(who);
        if let Some(n) = self.node_mut(node) {
            n.status = Status::Dead;
            n.ends.clear();
            n.queue.clear();
        }
        let mut mourners = Vec::new();
        for (i, n) in self.nodes.iter().enumerate() {
            let at = NodeId(u32::try_from(i).unwrap_or(u32::MAX));
            let ends = n.ends.iter().filter(|(_, e)| e.peer == who);
            mourners.extend(ends.map(|(ep, e)| Where { node: at, ep: *ep, uid: e.uid }));
        }
        for at in mourners {
            let error = FabricError::Closed(format!("node {} closed it", node.0));
            self.schedule(self.config.notice_delay_us, Event::Broken(at, error));
            if self.config.observe_death {
                self.schedule(self.config.death_delay_us, Event::Death(at));
            }
        }
    }

    /// From now on nothing of the dead node lands here, whichever endpoint it was posted on.
    pub(super) fn death(&mut self, at: Where) {
        let Some(end) = self.end_at(at) else { return };
        if end.phase == Phase::Fencing {
            return;
        }
        let (role, peer) = (end.role, end.peer);
        let here = (at.node, self.life(at.node));
        let theirs: Vec<u64> =
            self.links.iter().filter(|(_, l)| l.from == peer && l.to == here).map(|(id, _)| *id).collect();
        for link in theirs {
            self.close_link(link);
        }
        let error = FabricError::Closed(format!("node {} life {} is over", peer.0.0, peer.1));
        self.fail_flushes(at, &error);
        let mut connecting = false;
        if let Some(end) = self.end_at(at) {
            connecting = role == EndRole::Active && end.phase == Phase::Connecting;
            if matches!(end.phase, Phase::Open | Phase::Connecting) {
                end.phase = Phase::Broken(error.clone());
            }
        }
        self.say(at.node, Completion::PeerDied { ep: EpId(at.ep) });
        if connecting {
            self.connect_failed(at, error);
        }
    }

    pub(in crate::sim) fn restart(&mut self, node: NodeId) {
        self.kill(node);
        if let Some(n) = self.node_mut(node) {
            n.life = n.life.saturating_add(1);
            n.status = Status::Runs;
            for r in &mut n.regions {
                r.fill(0);
            }
        }
    }
}
