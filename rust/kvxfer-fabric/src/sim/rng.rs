//! Random numbers that a seed decides.

/// SplitMix64: small, fast, and good enough to choose delays.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The sequence of this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number from `low` to `high`, both included; `low` if they are the wrong way round.
    pub const fn between(&mut self, low: u64, high: u64) -> u64 {
        let draw = self.next_u64();
        match high.checked_sub(low) {
            None => low,
            Some(u64::MAX) => draw,
            // The bias of the remainder does not matter for delays.
            Some(span) => low + draw % (span + 1),
        }
    }

    /// Heads or tails.
    pub const fn coin(&mut self) -> bool {
        self.next_u64() >> 63 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        // The reference outputs for seed 1234567.
        let mut r = SplitMix64::new(1_234_567);
        let want = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([r.next_u64(), r.next_u64(), r.next_u64()], want);
    }

    #[test]
    fn ranges() {
        let mut r = SplitMix64::new(1);
        let draws: Vec<u64> = (0..1000).map(|_| r.between(3, 5)).collect();
        assert!((3..=5).all(|n| draws.contains(&n)) && draws.iter().all(|n| (3..=5).contains(n)));
        assert_eq!(r.between(9, 9), 9);
        assert_eq!(r.between(9, 1), 9);
        r.between(0, u64::MAX);
        let heads = (0..1000).filter(|_| r.coin()).count();
        assert!((400..600).contains(&heads), "{heads}");
    }
}
