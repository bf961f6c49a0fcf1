//! Which boxes of (layer, token) have been delivered, and whether they cover what is owed exactly once.

use crate::ids::PushId;
use crate::msg::Owed;

/// The part of `a` that lies in `b`; `None` if they share no layer or no token.
#[must_use]
pub fn intersect(a: &Owed, b: &Owed) -> Option<Owed> {
    let layers = (a.layers.0.max(b.layers.0), a.layers.1.min(b.layers.1));
    let tokens = (a.tokens.0.max(b.tokens.0), a.tokens.1.min(b.tokens.1));
    (layers.0 < layers.1 && tokens.0 < tokens.1).then_some(Owed { layers, tokens })
}

/// Layers times tokens.
#[must_use]
pub fn area(o: &Owed) -> u128 {
    u128::from(o.layers.1.saturating_sub(o.layers.0)) * u128::from(o.tokens.1.saturating_sub(o.tokens.0))
}

/// Delivered boxes, kept disjoint and inside what is owed.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Coverage {
    spans: Vec<(PushId, Owed)>,
    area: u128,
}

/// Why a box was not taken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CoverError {
    /// It leaves what is owed.
    Outside,
    /// It repeats this box of that push.
    Twice(PushId, Owed),
}

impl Coverage {
    /// Adds a delivered box. An empty one counts for nothing.
    ///
    /// # Errors
    /// When it leaves `owed` or overlaps what was delivered before.
    pub fn add(&mut self, owed: &Owed, push: PushId, span: &Owed) -> Result<(), CoverError> {
        if area(span) == 0 {
            return Ok(());
        }
        if intersect(owed, span).as_ref() != Some(span) {
            return Err(CoverError::Outside);
        }
        if let Some((p, s)) = self.spans.iter().find(|(_, s)| intersect(s, span).is_some()) {
            return Err(CoverError::Twice(*p, s.clone()));
        }
        self.area += area(span);
        self.spans.push((push, span.clone()));
        Ok(())
    }

    /// Takes back all boxes of a push. Returns whether there were any.
    pub fn retract(&mut self, push: PushId) -> bool {
        let before = self.spans.len();
        self.spans.retain(|(p, _)| *p != push);
        self.area = self.spans.iter().map(|(_, s)| area(s)).sum();
        before != self.spans.len()
    }

    /// Whether everything owed is there.
    #[must_use]
    pub fn covers(&self, owed: &Owed) -> bool {
        // Disjoint boxes inside `owed` fill it exactly when their areas add up.
        self.area == area(owed)
    }

    /// How many boxes there are.
    #[must_use]
    pub fn boxes(&self) -> usize {
        self.spans.len()
    }

    /// Whether anything of this box was delivered.
    #[must_use]
    pub fn meets(&self, span: &Owed) -> bool {
        self.spans.iter().any(|(_, s)| intersect(s, span).is_some())
    }

    /// Delivered so far, layers times tokens.
    #[must_use]
    pub fn area(&self) -> u128 {
        self.area
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn owed(l: (u32, u32), t: (u64, u64)) -> Owed {
        Owed { layers: l, tokens: t }
    }

    #[test]
    fn double_and_outside_are_refused() {
        let all = owed((0, 4), (16, 80));
        let mut c = Coverage::default();
        c.add(&all, PushId(1), &owed((0, 4), (16, 48))).unwrap();
        assert_eq!(
            c.add(&all, PushId(2), &owed((3, 4), (47, 49))),
            Err(CoverError::Twice(PushId(1), owed((0, 4), (16, 48))))
        );
        assert_eq!(c.add(&all, PushId(2), &owed((0, 4), (48, 81))), Err(CoverError::Outside));
        assert!(!c.covers(&all));
        c.add(&all, PushId(2), &owed((0, 4), (48, 80))).unwrap();
        assert!(c.covers(&all));
        assert!(c.retract(PushId(1)));
        assert!(!c.covers(&all));
    }

    proptest! {
        /// Against a grid of counters: a box is taken exactly when it is inside and touches no counted cell, and
        /// `covers` is true exactly when every cell counts one.
        #[test]
        fn equals_a_grid_of_counters(
            boxes in proptest::collection::vec((0u32..5, 0u32..5, 0u64..7, 0u64..7, any::<bool>()), 0..24)
        ) {
            let all = owed((1, 4), (1, 6));
            let mut grid = [[0u8; 8]; 8];
            let mut c = Coverage::default();
            for (i, (l0, dl, t0, dt, undo)) in boxes.into_iter().enumerate() {
                let s = owed((l0, l0 + dl), (t0, t0 + dt));
                let cells: Vec<(usize, usize)> = (l0..l0 + dl)
                    .flat_map(|l| (t0..t0 + dt).map(move |t| (l as usize, t as usize))).collect();
                let inside = cells.iter().all(|&(l, t)| (1..4).contains(&l) && (1..6).contains(&t));
                let free = inside && cells.iter().all(|&(l, t)| grid[l][t] == 0);
                let id = PushId(i as u64);
                prop_assert_eq!(c.add(&all, id, &s).is_ok(), cells.is_empty() || free);
                if free && !undo { for &(l, t) in &cells { grid[l][t] = 1; } }
                if undo { c.retract(id); }
                let full = (1..4).all(|l: usize| (1..6).all(|t: usize| grid[l][t] == 1));
                prop_assert_eq!(c.covers(&all), full);
            }
        }
    }
}
