//! Which pages are granted, and to which room.

use crate::error::{Reason, ReasonKind};
use crate::ids::Room;
use std::sync::Arc;

/// Owner of a page that no room holds. Rooms have 63 bits, so no room has this number.
const FREE: u64 = u64::MAX;

/// The owner of every page of every group.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PageBook {
    owners: Vec<Vec<u64>>,
    granted: u64,
}

impl PageBook {
    /// A book in which all pages are free.
    #[must_use]
    pub fn new(counts: &[u32]) -> Self {
        Self { owners: counts.iter().map(|&n| vec![FREE; n as usize]).collect(), granted: 0 }
    }

    /// Pages granted now.
    #[must_use]
    pub fn granted(&self) -> u64 {
        self.granted
    }

    /// Gives all these pages to `room`, or none.
    ///
    /// # Errors
    /// Out of range, repeated, or held by another room: the text names the page.
    pub fn grant(&mut self, room: Room, pages: &[Arc<[u32]>]) -> Result<(), Reason> {
        if pages.len() != self.owners.len() {
            return Err(Reason::new(
                ReasonKind::PageError,
                format!("{} page lists for {} groups", pages.len(), self.owners.len()),
            ));
        }
        for (g, list) in pages.iter().enumerate() {
            for (i, &page) in list.iter().enumerate() {
                if let Err(text) = self.take(room, g, page) {
                    self.undo(pages, g, i);
                    return Err(Reason::new(ReasonKind::PageError, format!("room {room}: {text}")));
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, room: Room, g: usize, page: u32) -> Result<(), String> {
        let owners = &mut self.owners[g];
        let count = owners.len();
        let Some(owner) = owners.get_mut(page as usize) else {
            return Err(format!(
                "page {page} of group {g} is out of range: the group has pages 0 to {}",
                count.saturating_sub(1)
            ));
        };
        if *owner == room.get() {
            return Err(format!("page {page} of group {g} is in the list twice"));
        }
        if *owner != FREE {
            return Err(format!(
                "page {page} of group {g} is still granted to room {owner}: reuse pages only after that room's released event"
            ));
        }
        *owner = room.get();
        self.granted += 1;
        Ok(())
    }

    fn undo(&mut self, pages: &[Arc<[u32]>], upto_group: usize, upto_index: usize) {
        for (g, list) in pages.iter().enumerate().take(upto_group + 1) {
            let n = if g == upto_group { upto_index } else { list.len() };
            self.free(g, &list[..n]);
        }
    }

    fn free(&mut self, g: usize, list: &[u32]) {
        for &page in list {
            if let Some(owner) = self.owners[g].get_mut(page as usize)
                && *owner != FREE
            {
                *owner = FREE;
                self.granted -= 1;
            }
        }
    }

    /// Frees a room's pages.
    pub fn release(&mut self, pages: &[Arc<[u32]>]) {
        for (g, list) in pages.iter().enumerate().take(self.owners.len()) {
            self.free(g, list);
        }
    }

    /// The room that holds a page, if any.
    #[must_use]
    pub fn owner(&self, group: usize, page: u32) -> Option<Room> {
        self.owners.get(group)?.get(page as usize).copied().and_then(Room::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lists(l: &[&[u32]]) -> Vec<Arc<[u32]>> {
        l.iter().map(|p| Arc::from(*p)).collect()
    }

    #[test]
    fn refusals_name_the_page_and_leave_nothing_behind() {
        let (a, b) = (Room::new(1).unwrap(), Room::new(2).unwrap());
        let mut book = PageBook::new(&[8, 4]);
        let before = book.clone();
        for (bad, word) in [
            (lists(&[&[1, 2], &[9]]), "page 9 of group 1 is out of range"),
            (lists(&[&[1, 2, 1], &[]]), "page 1 of group 0 is in the list twice"),
            (lists(&[&[1]]), "1 page lists for 2 groups"),
        ] {
            let err = book.grant(a, &bad).unwrap_err();
            assert!(err.text.contains(word), "{}", err.text);
            assert_eq!(book, before);
        }
        book.grant(a, &lists(&[&[3], &[0]])).unwrap();
        let err = book.grant(b, &lists(&[&[4, 3], &[]])).unwrap_err();
        assert!(err.text.contains("still granted to room 1"), "{}", err.text);
        assert_eq!(book.owner(0, 4), None);
        book.release(&lists(&[&[3], &[0]]));
        assert_eq!(book, before);
    }

    proptest! {
        /// No page ever has two owners, and what is released is free again.
        #[test]
        fn a_page_has_one_owner(ops in proptest::collection::vec((0u64..4, proptest::collection::vec(0u32..7, 0..5), any::<bool>()), 0..40)) {
            let mut book = PageBook::new(&[6]);
            let mut held: std::collections::BTreeMap<u64, Vec<Arc<[u32]>>> = Default::default();
            for (r, pages, release) in ops {
                if release {
                    if let Some(p) = held.remove(&r) { book.release(&p); }
                } else if !held.contains_key(&r) {
                    let p = lists(&[&pages]);
                    let mut uniq = pages.clone(); uniq.sort_unstable(); uniq.dedup();
                    let free = pages.iter().all(|x| *x < 6 && !held.values().any(|h| h[0].contains(x)));
                    let ok = book.grant(Room::new(r).unwrap(), &p).is_ok();
                    prop_assert_eq!(ok, free && uniq.len() == pages.len());
                    if ok { held.insert(r, p); }
                }
                let n: usize = held.values().map(|h| h[0].len()).sum();
                prop_assert_eq!(book.granted(), n as u64);
            }
        }
    }
}
