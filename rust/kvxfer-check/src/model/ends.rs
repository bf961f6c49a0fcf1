//! What has to hold when nothing will happen any more.

use super::world::{D, ROOMS, World, room};
use super::{Property, Violation};
use kvxfer_proto::node::PeerKey;

impl World {
    /// What has to hold when nothing will happen any more.
    #[must_use]
    pub fn check_end(&self) -> Option<Violation> {
        self.left_over().or_else(|| self.unlucky()).filter(|v| self.setup.checks(v.property))
    }

    /// A room that did not succeed although no fault has happened.
    fn unlucky(&self) -> Option<Violation> {
        if self.faults_left < self.setup.faults {
            return None;
        }
        let rooms = ROOMS.min(self.setup.expected.into());
        let rooms = self.setup.addresses().flat_map(|at| (0..rooms).map(move |r| (at, r)));
        let (at, r) = rooms.into_iter().find(|(at, r)| self.procs[*at].rooms[*r].success == 0)?;
        let text =
            format!("no fault has happened, and room {} did not succeed at {}", room(r), self.name(at));
        Some(Violation { property: Property::FaultFreeRoomsSucceed, text })
    }

    /// How every room stands at every process, in short. Of a process that is never continued nothing is asked.
    pub(crate) fn outcome(&self) -> String {
        self.setup.addresses().map(|at| self.outcome_at(at)).collect::<Vec<_>>().join(", ")
    }

    /// The same of one process.
    pub(crate) fn outcome_at(&self, at: usize) -> String {
        let p = &self.procs[at];
        if p.stopped {
            return format!("{} stopped", self.name(at));
        }
        let rooms = p.rooms.map(|s| {
            let end = match (s.success, s.failed) {
                (0, 0) => "open",
                (0, _) => "failed",
                _ => "success",
            };
            format!("{end}/{}", s.released)
        });
        format!("{} {}", self.name(at), rooms.join(" "))
    }

    fn left_over(&self) -> Option<Violation> {
        for at in self.setup.addresses().filter(|at| !self.procs[*at].stopped) {
            let p = &self.procs[at];
            let who = self.name(at);
            // A peer that is stopped is neither dead nor answering: where nothing fences it, it holds pages.
            let held = |peers: &[PeerKey]| {
                self.setup.family.is_unfenced()
                    && peers.iter().all(|k| self.alive(k.incarnation).is_some_and(|a| self.procs[a].stopped))
            };
            if at == D
                && let Some(lost) = self.lost_slot(held)
            {
                return Some(lost);
            }
            let quarantine = p.node.unreleased();
            for (r, seen) in p.rooms.iter().enumerate().filter(|(_, s)| s.ordered) {
                if !seen.is_over() {
                    return Some(Violation {
                        property: Property::OneEnd,
                        text: format!("room {} never ends at {who}", room(r)),
                    });
                }
                let may_wait = at == D && quarantine.iter().any(|q| q.room == room(r) && held(&q.peers));
                if seen.released == 0 && !may_wait {
                    return Some(Violation {
                        property: Property::EveryPageComesBack,
                        text: format!("room {} is never released at {who}", room(r)),
                    });
                }
            }
            let g = p.node.gauges();
            let waiting = quarantine.len() as u64;
            let pages: u64 = if at == D { waiting } else { 0 };
            if (g.inbound, g.outbound, g.granted_pages, g.quarantined_pages, g.deliveries)
                != (pages, 0, pages, pages, 0)
                || !p.running.is_empty()
            {
                return Some(Violation {
                    property: Property::NothingIsLeft,
                    text: format!("{who} holds {g:?} and {} deliveries in the end", p.running.len()),
                });
            }
        }
        None
    }
}
