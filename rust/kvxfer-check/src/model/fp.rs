//! 128-bit fingerprints of states.

use std::hash::{BuildHasherDefault, Hash, Hasher};

/// Two independent lanes of multiply-and-fold. Not for hostile input: a checker's states are its own.
#[derive(Clone, Copy)]
pub(crate) struct Fp(u64, u64);

impl Default for Fp {
    fn default() -> Self {
        Self(0x243F_6A88_85A3_08D3, 0x1319_8A2E_0370_7344)
    }
}

fn fold(x: u64, y: u64) -> u64 {
    let p = u128::from(x) * u128::from(y);
    #[allow(clippy::cast_possible_truncation)] // Both halves are used.
    let (low, high) = (p as u64, (p >> 64) as u64);
    low ^ high
}

impl Fp {
    pub(crate) fn of(value: &impl Hash) -> u128 {
        let mut h = Self::default();
        value.hash(&mut h);
        h.wide()
    }

    fn wide(self) -> u128 {
        let a = fold(self.0 ^ 0xA409_3822_299F_31D1, 0x9E37_79B9_7F4A_7C15);
        let b = fold(self.1 ^ 0x082E_FA98_EC4E_6C89, 0xD6E8_FEB8_6659_FD93);
        (u128::from(a) << 64) | u128::from(b)
    }
}

impl Hasher for Fp {
    fn finish(&self) -> u64 {
        fold(self.0, self.1 | 1)
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0u8; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
        self.write_u64(bytes.len() as u64);
    }

    fn write_u8(&mut self, n: u8) {
        self.write_u64(u64::from(n));
    }

    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = fold(self.0 ^ n, 0x2545_F491_4F6C_DD1D).wrapping_add(0x452_821E_638D_0137);
        self.1 = fold(self.1.rotate_left(23) ^ n, 0xC2B2_AE3D_27D4_EB4F).wrapping_add(0x7BE5_466C_F34E_90C6);
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }

    #[allow(clippy::cast_sign_loss)] // Bits are bits.
    fn write_isize(&mut self, n: isize) {
        self.write_u64(n as u64);
    }
}

/// A fingerprint is its own hash.
#[derive(Clone, Copy, Default)]
pub(crate) struct Itself(u64);

impl Hasher for Itself {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*b);
        }
    }

    #[allow(clippy::cast_possible_truncation)] // The low half is as good as the whole.
    fn write_u128(&mut self, n: u128) {
        self.0 = n as u64;
    }
}

pub(crate) type Prints = std::collections::HashSet<u128, BuildHasherDefault<Itself>>;
pub(crate) type PrintMap<V> = std::collections::HashMap<u128, V, BuildHasherDefault<Itself>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_near_values_have_a_million_fingerprints_in_each_half() {
        let mut high = std::collections::HashSet::new();
        let mut low = std::collections::HashSet::new();
        for n in 0u64..1_000_000 {
            let fp = Fp::of(&(n % 1000, vec![n / 1000], [0u8; 3]));
            high.insert((fp >> 64) as u64);
            low.insert(u64::try_from(fp & u128::from(u64::MAX)).unwrap());
        }
        assert_eq!((high.len(), low.len()), (1_000_000, 1_000_000));
    }

    #[test]
    fn where_one_list_ends_and_the_next_begins_counts() {
        assert_ne!(Fp::of(&(vec![1u8, 2], vec![3u8])), Fp::of(&(vec![1u8], vec![2u8, 3])));
    }
}
