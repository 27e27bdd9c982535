//! Numbers in bincode's encoding: one byte up to 250, otherwise a tag and 2, 4 or 8 bytes.

use alloc::vec::Vec;

const MAX_ONE_BYTE: u8 = 250;
const TWO_BYTES: u8 = 251;
const FOUR_BYTES: u8 = 252;
const EIGHT_BYTES: u8 = 253;

/// Why no number could be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The bytes end inside the number.
    Cut,
    /// The number is not in its shortest form, or is wider than 64 bits.
    Malformed,
}

/// Reads a number from the start of `rest`. Rule B2: each number has one encoding, the shortest.
#[inline]
pub(super) fn take(rest: &mut &[u8]) -> Result<u64, Fault> {
    let (&tag, after) = rest.split_first().ok_or(Fault::Cut)?;
    if tag <= MAX_ONE_BYTE {
        *rest = after;
        return Ok(u64::from(tag));
    }
    let (number, least, after) = match tag {
        TWO_BYTES => {
            let (bytes, after) = after.split_first_chunk().ok_or(Fault::Cut)?;
            (u64::from(u16::from_le_bytes(*bytes)), 251, after)
        }
        FOUR_BYTES => {
            let (bytes, after) = after.split_first_chunk().ok_or(Fault::Cut)?;
            (u64::from(u32::from_le_bytes(*bytes)), 1 << 16, after)
        }
        EIGHT_BYTES => {
            let (bytes, after) = after.split_first_chunk().ok_or(Fault::Cut)?;
            (u64::from_le_bytes(*bytes), 1 << 32, after)
        }
        _ => return Err(Fault::Malformed),
    };
    if number < least {
        return Err(Fault::Malformed);
    }
    *rest = after;
    Ok(number)
}

/// Appends `number` in its shortest form.
pub(super) fn put(number: u64, out: &mut Vec<u8>) {
    let bytes = number.to_le_bytes();
    let (tag, nbytes) = match number {
        0..=250 => (None, 1),
        251..=0xFFFF => (Some(TWO_BYTES), 2),
        0x1_0000..=0xFFFF_FFFF => (Some(FOUR_BYTES), 4),
        _ => (Some(EIGHT_BYTES), 8),
    };
    out.extend(tag);
    out.extend_from_slice(&bytes[..nbytes]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(number: u64) -> Vec<u8> {
        let mut out = Vec::new();
        put(number, &mut out);
        out
    }

    #[test]
    fn every_width_begins_where_the_one_before_ends() {
        for (number, bytes) in [
            (0, &[0][..]),
            (250, &[250]),
            (251, &[251, 251, 0]),
            (3000, &[0xfb, 0xb8, 0x0b]),
            (0xffff, &[251, 0xff, 0xff]),
            (0x1_0000, &[252, 0, 0, 1, 0]),
            (0xffff_ffff, &[252, 0xff, 0xff, 0xff, 0xff]),
            (0x1_0000_0000, &[253, 0, 0, 0, 0, 1, 0, 0, 0]),
            (u64::MAX, &[253, 255, 255, 255, 255, 255, 255, 255, 255]),
        ] {
            assert_eq!(written(number), bytes);
        }
    }

    #[test]
    fn rejects_longer_spellings_and_wider_numbers() {
        for bytes in [
            &[251, 250, 0][..],
            &[252, 0xff, 0xff, 0, 0],
            &[253, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0],
            &[254, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            &[255],
        ] {
            assert_eq!(take(&mut &*bytes), Err(Fault::Malformed), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn taking_gives_what_was_put(shift in 0_u32..64, bits: u64, after: Vec<u8>) {
            let number = bits >> shift;
            let mut bytes = written(number);
            for nbytes in 0..bytes.len() {
                prop_assert_eq!(take(&mut &bytes[..nbytes]), Err(Fault::Cut));
            }
            bytes.extend_from_slice(&after);
            let mut rest = &bytes[..];
            prop_assert_eq!(take(&mut rest), Ok(number));
            prop_assert_eq!(rest, after);
        }

        #[test]
        fn what_is_taken_is_what_would_be_put(bytes in proptest::collection::vec(any::<u8>(), 0..12), tag in 248_u8..) {
            let bytes = [&[tag][..], &bytes].concat();
            let mut rest = &bytes[..];
            if let Ok(number) = take(&mut rest) {
                prop_assert_eq!(written(number), &bytes[..bytes.len() - rest.len()]);
            }
        }
    }
}
