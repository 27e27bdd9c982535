//! The order of names that people expect: `layer.2` before `layer.10`.

use core::cmp::Ordering;

/// Compares two names part by part, where dots separate parts. Parts are compared by their letters and by the values of
/// the numbers in them.
/// If one part is the beginning of the other, the shorter part comes first. At the first difference, a number comes before
/// text.
/// If two parts differ only in leading zeros, the part with more zeros comes first. Only identical names compare equal.
///
/// ```
/// let mut names = ["h.10", "head", "h.2", "h.02", "h"];
/// names.sort_by(|one, other| ingot_format::natural_order(one, other));
/// assert_eq!(names, ["h", "h.02", "h.2", "h.10", "head"]);
/// ```
#[must_use]
pub fn natural_order(one: &str, other: &str) -> Ordering {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    let at = differing_from(one, other);
    let (mut one, mut other) = (&one[at..], &other[at..]);
    let mut zeros = Ordering::Equal;
    loop {
        let ((token, nbytes), (theirs, their_nbytes)) = (first(one), first(other));
        if token.ends_part() && theirs.ends_part() && zeros.is_ne() {
            return zeros;
        }
        let order = token.cmp(&theirs);
        if order.is_ne() || token == Token::End {
            return order;
        }
        zeros = zeros.then(their_nbytes.cmp(&nbytes));
        (one, other) = (&one[nbytes..], &other[their_nbytes..]);
    }
}

/// Returns the beginning of the first token that may differ.
fn differing_from(one: &[u8], other: &[u8]) -> usize {
    // Names have long common prefixes; comparing them word by word takes less time.
    let words = one.as_chunks::<8>().0.iter().zip(other.as_chunks::<8>().0);
    let mut at = 8 * words.take_while(|(a, b)| a == b).count();
    at += one[at..]
        .iter()
        .zip(&other[at..])
        .take_while(|(a, b)| a == b)
        .count();
    while at > 0 && one[at - 1].is_ascii_digit() {
        at -= 1;
    }
    at
}

/// A unit of comparison. Tokens are compared one after the other, first by kind.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Token<'a> {
    End,
    Dot,
    /// A number without leading zeros: of two numbers the one with more digits is larger.
    Number(usize, &'a [u8]),
    /// A byte of UTF-8, whose byte order is the order of its characters.
    Byte(u8),
}

impl Token<'_> {
    fn ends_part(&self) -> bool {
        matches!(self, Token::End | Token::Dot)
    }
}

/// Returns the first token of `text` and its length in bytes.
fn first(text: &[u8]) -> (Token<'_>, usize) {
    match text.first() {
        None => (Token::End, 0),
        Some(b'.') => (Token::Dot, 1),
        Some(byte) if byte.is_ascii_digit() => number(text),
        Some(&byte) => (Token::Byte(byte), 1),
    }
}

fn number(text: &[u8]) -> (Token<'_>, usize) {
    let count = |of: &[u8], is: fn(&u8) -> bool| of.iter().take_while(|byte| is(byte)).count();
    let nbytes = count(text, u8::is_ascii_digit);
    let zeros = count(&text[..nbytes], |&byte| byte == b'0');
    (Token::Number(nbytes - zeros, &text[zeros..nbytes]), nbytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::String;
    use alloc::vec::Vec;
    use core::cmp::Reverse;
    use proptest::prelude::*;

    /// The texts of a part with the number after each, and the lengths of the numbers.
    type Part = (Vec<(String, Option<u128>)>, Vec<Reverse<usize>>);

    fn naive_part(part: &str) -> Part {
        let mut pieces: Vec<(String, Option<u128>)> = Vec::new();
        let mut lengths = Vec::new();
        let mut rest = part;
        loop {
            let text: String = rest.chars().take_while(|c| !c.is_ascii_digit()).collect();
            rest = &rest[text.len()..];
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            rest = &rest[digits.len()..];
            pieces.push((text, digits.parse().ok()));
            lengths.push(Reverse(digits.len()));
            if digits.is_empty() {
                return (pieces, lengths);
            }
        }
    }

    fn naive_key(name: &str) -> Vec<Part> {
        name.split('.').map(naive_part).collect()
    }

    proptest! {
        #[test]
        fn is_the_order_of_the_obvious_key(one in "[ab.0019_é-]{0,12}", other in "[ab.0019_é-]{0,12}") {
            prop_assert_eq!(natural_order(&one, &other), naive_key(&one).cmp(&naive_key(&other)));
        }

        #[test]
        fn only_equal_names_are_equal(one in "[a.01]{0,6}", other in "[a.01]{0,6}") {
            prop_assert_eq!(natural_order(&one, &other).is_eq(), one == other);
            prop_assert_eq!(natural_order(&one, &other), natural_order(&other, &one).reverse());
        }
    }

    #[test]
    fn skips_common_prefixes_but_no_digit_of_a_number() {
        for common in (0..40).map(|nbytes| "model.h.7".chars().cycle().take(nbytes).collect::<String>()) {
            let order =
                |one: &str, other: &str| natural_order(&[&common, one].concat(), &[&common, other].concat());
            assert_eq!(order(".2.z", ".10.a"), Ordering::Less, "{common}");
            assert_eq!(order("x12", "x3"), Ordering::Greater, "{common}");
            assert_eq!(order("x120", "x121"), Ordering::Less, "{common}");
        }
    }

    #[test]
    fn numbers_are_compared_by_value_however_long() {
        let long = "9".repeat(100);
        assert_eq!(natural_order("h.2", "h.10"), Ordering::Less);
        assert_eq!(natural_order(&["h.", &long].concat(), "h.1"), Ordering::Greater);
        assert_eq!(
            natural_order(&["h.", &long].concat(), &["h.0", &long].concat()),
            Ordering::Greater
        );
        assert_eq!(natural_order("h.01.b", "h.1.a"), Ordering::Less);
        assert_eq!(natural_order("h.01b", "h.1a"), Ordering::Greater);
        // Leading zeros decide only if the parts are otherwise equal.
        assert_eq!(natural_order("h.1", "h.01b"), Ordering::Less);
    }
}
