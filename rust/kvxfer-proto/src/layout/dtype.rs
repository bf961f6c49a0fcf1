//! Element types.

/// Element type. The numbers are on the wire.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum DType {
    /// 4-byte float.
    Float32 = 1,
    /// IEEE half.
    Float16 = 2,
    /// bfloat16.
    Bfloat16 = 3,
    /// fp8 e4m3.
    Float8E4m3 = 4,
    /// fp8 e5m2.
    Float8E5m2 = 5,
    /// 8-bit integer.
    Int8 = 6,
    /// Bytes.
    Uint8 = 7,
    /// 4-bit integers, two a byte.
    Int4 = 8,
    /// 4-bit unsigned integers, two a byte.
    Uint4 = 9,
    /// fp4 e2m1, two a byte.
    Float4E2m1 = 10,
    /// fp8 e8m0: the scales of microscaling formats.
    Float8E8m0 = 11,
}

impl DType {
    /// Bits of one element.
    #[must_use]
    pub const fn bits(self) -> u64 {
        match self {
            Self::Float32 => 32,
            Self::Float16 | Self::Bfloat16 => 16,
            Self::Float8E4m3 | Self::Float8E5m2 | Self::Float8E8m0 | Self::Int8 | Self::Uint8 => 8,
            Self::Int4 | Self::Uint4 | Self::Float4E2m1 => 4,
        }
    }

    /// Bytes of `count` elements; those of 4 bits lie in pairs.
    #[must_use]
    pub const fn bytes_of(self, count: u32) -> u64 {
        count as u64 * self.bits() / 8
    }

    /// How many elements share a byte: 1, or 2 for those of 4 bits.
    #[must_use]
    pub const fn packed(self) -> u32 {
        if self.bits() < 8 { 2 } else { 1 }
    }

    /// The type with this name; takes numpy's and torch's names (with or without `torch.`) and the usual short ones.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.strip_prefix("torch.").unwrap_or(name);
        Some(match name {
            "float32" | "float" | "fp32" | "f32" => Self::Float32,
            "float16" | "half" | "fp16" | "f16" => Self::Float16,
            "bfloat16" | "bf16" => Self::Bfloat16,
            "float8_e4m3" | "float8_e4m3fn" | "fp8_e4m3" | "fp8" => Self::Float8E4m3,
            "float8_e5m2" | "fp8_e5m2" => Self::Float8E5m2,
            "int8" | "i8" => Self::Int8,
            "uint8" | "u8" => Self::Uint8,
            "int4" | "i4" => Self::Int4,
            "uint4" | "u4" => Self::Uint4,
            "float4_e2m1" | "float4_e2m1fn" | "float4_e2m1fn_x2" | "fp4" => Self::Float4E2m1,
            "float8_e8m0" | "float8_e8m0fnu" => Self::Float8E8m0,
            _ => return None,
        })
    }

    /// The canonical name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Float8E4m3 => "float8_e4m3",
            Self::Float8E5m2 => "float8_e5m2",
            Self::Int8 => "int8",
            Self::Uint8 => "uint8",
            Self::Int4 => "int4",
            Self::Uint4 => "uint4",
            Self::Float4E2m1 => "float4_e2m1",
            Self::Float8E8m0 => "float8_e8m0",
        }
    }

    /// The type with this number on the wire.
    #[must_use]
    pub const fn from_wire(n: u8) -> Option<Self> {
        Some(match n {
            1 => Self::Float32,
            2 => Self::Float16,
            3 => Self::Bfloat16,
            4 => Self::Float8E4m3,
            5 => Self::Float8E5m2,
            6 => Self::Int8,
            7 => Self::Uint8,
            8 => Self::Int4,
            9 => Self::Uint4,
            10 => Self::Float4E2m1,
            11 => Self::Float8E8m0,
            _ => return None,
        })
    }
}
