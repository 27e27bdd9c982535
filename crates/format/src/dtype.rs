//! The element types, in one table.

use core::fmt;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $code:ident $text:literal $bits:literal $bt:expr;)*) => {
        /// The type of a tensor's elements.
        ///
        /// The variants are spelled as in the file. Their order is the reverse of the order in which a writer of
        /// safetensors places tensors (FORMAT.md, "Writing").
        ///
        /// ```
        /// use ingot_format::Dtype;
        ///
        /// assert_eq!(Dtype::from_code("BF16"), Some(Dtype::BF16));
        /// assert_eq!((Dtype::BF16.bits(), Dtype::F4.bits()), (16, 4));
        /// ```
        #[allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "spelled as in the file")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Dtype {
            $($(#[$doc])* $code,)*
        }

        impl Dtype {
            /// Every dtype, in table order.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$code),*];

            /// The dtype's name in a safetensors header, such as `BF16`.
            #[must_use]
            pub const fn code(self) -> &'static str {
                match self { $(Dtype::$code => $text,)* }
            }

            /// Bits per element. Less than 8 for the packed dtypes.
            #[must_use]
            pub const fn bits(self) -> u64 {
                match self { $(Dtype::$code => $bits,)* }
            }

            /// The dtype's number in a `.bt` header, for the dtypes that the format has.
            #[must_use]
            pub const fn bintensors_number(self) -> Option<u8> {
                match self { $(Dtype::$code => $bt,)* }
            }

            /// Returns the dtype of this name, which is matched exactly as the file spells it.
            #[must_use]
            pub fn from_code(code: &str) -> Option<Dtype> {
                match code { $($text => Some(Dtype::$code),)* _ => None }
            }
        }
    };
}

dtypes! {
    // variant      code          bits  number in .bt
    /// One byte, 0 or 1. Other values are passed through.
    BOOL            "BOOL"        8     Some(0);
    /// 4-bit float (E2M1), two to a byte, the first in the low half.
    F4              "F4"          4     None;
    /// 6-bit float with 2 exponent and 3 mantissa bits, four to three bytes.
    F6_E2M3         "F6_E2M3"     6     None;
    /// 6-bit float with 3 exponent and 2 mantissa bits, four to three bytes.
    F6_E3M2         "F6_E3M2"     6     None;
    /// Unsigned 8-bit integer.
    U8              "U8"          8     Some(1);
    /// Signed 8-bit integer.
    I8              "I8"          8     Some(2);
    /// 8-bit float with 5 exponent bits (OCP FP8).
    F8_E5M2         "F8_E5M2"     8     Some(3);
    /// 8-bit float with 4 exponent bits, finite only (OCP FP8).
    F8_E4M3         "F8_E4M3"     8     Some(4);
    /// 8-bit power of two, the scale of the microscaling formats.
    F8_E8M0         "F8_E8M0"     8     None;
    /// 8-bit float with 4 exponent bits, finite, one zero.
    F8_E4M3FNUZ     "F8_E4M3FNUZ" 8     None;
    /// 8-bit float with 5 exponent bits, finite, one zero.
    F8_E5M2FNUZ     "F8_E5M2FNUZ" 8     None;
    /// Signed 16-bit integer.
    I16             "I16"         16    Some(5);
    /// Unsigned 16-bit integer.
    U16             "U16"         16    Some(6);
    /// IEEE half precision.
    F16             "F16"         16    Some(7);
    /// The upper half of an `F32`.
    BF16            "BF16"        16    Some(8);
    /// Signed 32-bit integer.
    I32             "I32"         32    Some(9);
    /// Unsigned 32-bit integer.
    U32             "U32"         32    Some(10);
    /// IEEE single precision.
    F32             "F32"         32    Some(11);
    /// Two `F32`, real then imaginary.
    C64             "C64"         64    None;
    /// IEEE double precision.
    F64             "F64"         64    Some(12);
    /// Signed 64-bit integer.
    I64             "I64"         64    Some(13);
    /// Unsigned 64-bit integer.
    U64             "U64"         64    Some(14);
}

impl Dtype {
    /// Returns [`Dtype::bits`]. The safetensors crate uses this name.
    #[must_use]
    pub fn bitsize(&self) -> usize {
        // At most 64.
        usize::try_from(self.bits()).unwrap_or(64)
    }

    /// Returns the whole bytes of one element, as the safetensors crate does: 0 for the packed dtypes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.bitsize() / 8
    }

    /// Returns the dtype of this number in a `.bt` header.
    #[must_use]
    pub fn from_bintensors_number(number: u8) -> Option<Dtype> {
        // A table, because searching all dtypes takes longer than the rest of an entry.
        const BY_NUMBER: [Option<Dtype>; 256] = {
            let mut table = [None; 256];
            let mut place = 0;
            while place < Dtype::ALL.len() {
                if let Some(number) = Dtype::ALL[place].bintensors_number() {
                    table[number as usize] = Some(Dtype::ALL[place]);
                }
                place += 1;
            }
            table
        };
        BY_NUMBER[usize::from(number)]
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_numbers_lead_back_to_their_dtype() {
        for &dtype in Dtype::ALL {
            assert_eq!(Dtype::from_code(dtype.code()), Some(dtype));
            if let Some(number) = dtype.bintensors_number() {
                assert_eq!(Dtype::from_bintensors_number(number), Some(dtype));
            }
        }
        assert_eq!(Dtype::ALL.len(), 22);
        assert_eq!((0..=255).filter_map(Dtype::from_bintensors_number).count(), 15);
    }

    #[test]
    fn sizes_are_those_of_the_safetensors_crate() {
        for (dtype, bits, bytes) in [
            (Dtype::F4, 4, 0),
            (Dtype::F6_E2M3, 6, 0),
            (Dtype::U8, 8, 1),
            (Dtype::BF16, 16, 2),
            (Dtype::C64, 64, 8),
        ] {
            assert_eq!((dtype.bitsize(), dtype.size()), (bits, bytes), "{dtype}");
        }
    }
}
