//! Names for stored tensors or parts of them, kept in the metadata. FORMAT.md, "Shared tensors".

use alloc::borrow::ToOwned;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::checksums::Text;
use crate::codec::json::string;
use crate::quoted::Quoted;

/// The metadata key for names that have no stored tensor of their own.
pub const SHARED_KEY: &str = "ingot.shared";

/// Most dimensions that a part of a tensor may have: torch and NumPy support no more, and each dimension takes two
/// bytes of the record and costs a reader a multiplication.
const MAX_DIMS: usize = 64;

/// A strided part of a tensor. Proven: it has at least one element and at most 64 dimensions, and neither the number of
/// elements nor the position of the last one reaches 2⁶³.
///
/// Positions are counted in elements of the tensor, or in bytes for F4, which packs two elements into a byte.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Excerpt {
    shape: Vec<u64>,
    stride: Vec<u64>,
    begin: u64,
    count: u64,
    end: u64,
}

impl Excerpt {
    /// Creates a part; `None` if no tensor can have such a part.
    #[must_use]
    pub fn new(shape: Vec<u64>, stride: Vec<u64>, begin: u64) -> Option<Excerpt> {
        const LIMIT: u64 = 1 << 63;
        if shape.len() != stride.len() || shape.len() > MAX_DIMS || shape.contains(&0) {
            return None;
        }
        let count = shape.iter().try_fold(1_u64, |n, &dim| n.checked_mul(dim))?;
        let steps = shape.iter().zip(&stride);
        let last = steps
            .map(|(&dim, &step)| (dim - 1).checked_mul(step))
            .try_fold(begin, |at, steps| at.checked_add(steps?))?;
        let fits = count < LIMIT && last < LIMIT && stride.iter().all(|&step| step < LIMIT);
        fits.then_some(Excerpt {
            shape,
            stride,
            begin,
            count,
            end: last + 1,
        })
    }

    /// Returns the same part of a tensor that begins at element `by` of this one.
    #[must_use]
    pub fn counted_from(&self, by: u64) -> Option<Excerpt> {
        Excerpt::new(
            self.shape.clone(),
            self.stride.clone(),
            self.begin.checked_sub(by)?,
        )
    }

    /// The size of each dimension.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The distance in elements from one index to the next, along each dimension.
    #[must_use]
    pub fn stride(&self) -> &[u64] {
        &self.stride
    }

    /// The first element.
    #[must_use]
    pub fn begin(&self) -> u64 {
        self.begin
    }

    /// The element after the last.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.end
    }

    /// The number of elements.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether the elements are contiguous in row-major order.
    #[must_use]
    pub fn is_packed(&self) -> bool {
        let mut below = 1;
        self.shape.iter().zip(&self.stride).rev().all(|(&dim, &step)| {
            let packed = dim == 1 || step == below;
            below *= dim;
            packed
        })
    }

    /// Returns the position of element `number`, counted in row-major order.
    #[must_use]
    pub fn place(&self, mut number: u64) -> u64 {
        let mut place = self.begin;
        for (dim, step) in self.shape.iter().zip(&self.stride).rev() {
            place += number % dim * step;
            number /= dim;
        }
        place
    }
}

/// A name for a stored tensor, or for a part of one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SharedName {
    /// The name.
    pub name: String,
    /// The name of the stored tensor.
    pub of: String,
    /// The part; `None` for the whole tensor.
    pub part: Option<Excerpt>,
}

/// Why a text is not such a record, or not a record of its file.
///
/// ```
/// use ingot_format::parse_shared;
///
/// let fault = parse_shared("[]").unwrap_err();
/// assert_eq!(fault.tensor(), None);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedError {
    tensor: Option<String>,
    reason: String,
}

impl SharedError {
    /// Creates the error for a wrong entry of `tensor`.
    #[must_use]
    pub fn about(tensor: &str, reason: &str) -> SharedError {
        SharedError {
            tensor: Some(tensor.to_owned()),
            reason: reason.to_owned(),
        }
    }

    /// Returns the name at fault, if there is one.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        self.tensor.as_deref()
    }
}

impl fmt::Display for SharedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.tensor {
            Some(tensor) => write!(
                f,
                "tensor {}: metadata {} {}",
                Quoted(tensor),
                Quoted(SHARED_KEY),
                self.reason
            ),
            None => write!(
                f,
                "metadata {} is not a record of shared tensors: {}",
                Quoted(SHARED_KEY),
                self.reason
            ),
        }
    }
}

impl core::error::Error for SharedError {}

/// Parses a record and returns its names, sorted. Whether the stored tensors exist is checked by code that has the
/// header.
///
/// # Errors
/// If the text is not JSON of this form, or has a name twice (also by way of an escape) or a part that no tensor can
/// have.
pub fn parse_shared(text: &str) -> Result<Vec<SharedName>, SharedError> {
    let mut json = serde_json::Deserializer::from_str(text);
    let mut names = json
        .deserialize_map(SharedVisitor)
        .and_then(|names| json.end().map(|()| names))
        .map_err(|fault| SharedError {
            tensor: None,
            reason: fault.to_string(),
        })?;
    names.sort();
    match names.windows(2).find(|pair| pair[0].name == pair[1].name) {
        Some(pair) => Err(SharedError {
            tensor: None,
            reason: alloc::format!("the name {} occurs twice", Quoted(&pair[0].name)),
        }),
        None => Ok(names),
    }
}

/// Renders the record of `names` as it is stored in a file: sorted, without white space.
#[must_use]
pub fn render_shared(names: &mut [SharedName]) -> String {
    names.sort();
    let mut out = Vec::new();
    for (number, SharedName { name, of, part }) in names.iter().enumerate() {
        out.push(if number == 0 { b'{' } else { b',' });
        string(name, &mut out);
        match part {
            None => out.extend_from_slice(b":{\"of\":"),
            Some(part) => {
                out.extend_from_slice(b":{\"begin\":");
                out.extend_from_slice(part.begin.to_string().as_bytes());
                out.extend_from_slice(b",\"of\":");
            }
        }
        string(of, &mut out);
        if let Some(part) = part {
            list(b",\"shape\":", &part.shape, &mut out);
            list(b",\"stride\":", &part.stride, &mut out);
        }
        out.push(b'}');
    }
    out.extend_from_slice(if names.is_empty() { b"{}" } else { b"}" });
    // Built from text and ASCII, so no byte is ever replaced.
    String::from_utf8_lossy(&out).into_owned()
}

fn list(key: &[u8], numbers: &[u64], out: &mut Vec<u8>) {
    out.extend_from_slice(key);
    out.push(b'[');
    for (place, number) in numbers.iter().enumerate() {
        if place > 0 {
            out.push(b',');
        }
        out.extend_from_slice(number.to_string().as_bytes());
    }
    out.push(b']');
}

struct SharedVisitor;

impl<'de> Visitor<'de> for SharedVisitor {
    type Value = Vec<SharedName>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from names to objects with `of`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut names = Vec::new();
        while let Some(Text(name)) = members.next_key()? {
            let StoredPart { of, part } = members.next_value()?;
            names.push(SharedName {
                name: name.into_owned(),
                of,
                part,
            });
        }
        Ok(names)
    }
}

/// The stored tensor of one name, and the part of it. Members with other names are ignored, as in a header's entries
/// (F8).
struct StoredPart {
    of: String,
    part: Option<Excerpt>,
}

impl<'de> Deserialize<'de> for StoredPart {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = StoredPart;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with `of`")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<StoredPart, A::Error> {
                let (mut of, mut shape, mut stride, mut begin) = (None, None, None, None);
                while let Some(Text(member)) = members.next_key()? {
                    let twice = match &*member {
                        "of" => of.replace(members.next_value::<Text<'de>>()?.0).is_some(),
                        "shape" => shape.replace(members.next_value::<DimList>()?.0).is_some(),
                        "stride" => stride.replace(members.next_value::<DimList>()?.0).is_some(),
                        "begin" => begin.replace(members.next_value::<u64>()?).is_some(),
                        _ => {
                            members.next_value::<IgnoredAny>()?;
                            false
                        }
                    };
                    if twice {
                        return Err(Error::custom(format_args!("{} occurs twice", Quoted(&member))));
                    }
                }
                let part = match (shape, stride, begin) {
                    (None, None, None) => None,
                    (Some(shape), Some(stride), Some(begin)) => {
                        let part = Excerpt::new(shape, stride, begin);
                        Some(part.ok_or_else(|| Error::custom("no tensor can have such a part"))?)
                    }
                    _ => return Err(Error::custom("expected all of `shape`, `stride` and `begin`")),
                };
                let of = of.ok_or_else(|| Error::missing_field("of"))?.into_owned();
                Ok(StoredPart { of, part })
            }
        }
        json.deserialize_map(Members)
    }
}

/// A list of dimensions. Numbers beyond the limit are not kept.
struct DimList(Vec<u64>);

impl<'de> Deserialize<'de> for DimList {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = DimList;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of integers from 0 on")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<DimList, A::Error> {
                let mut dims = Vec::new();
                while let Some(dim) = list.next_element()? {
                    if dims.len() == MAX_DIMS {
                        return Err(Error::custom(format_args!("more than {MAX_DIMS} dimensions")));
                    }
                    dims.push(dim);
                }
                Ok(DimList(dims))
            }
        }
        json.deserialize_seq(List)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    fn part() -> impl Strategy<Value = Option<Excerpt>> {
        let dims = proptest::collection::vec((1..5_u64, 0..9_u64), 0..4);
        proptest::option::of((dims, 0..100_u64)).prop_map(|part| {
            let (dims, begin) = part?;
            let (shape, stride) = dims.into_iter().unzip();
            Excerpt::new(shape, stride, begin)
        })
    }

    proptest! {
        #[test]
        fn a_record_reads_as_it_was_written(
            names in proptest::collection::btree_map(any::<String>(), (any::<String>(), part()), 0..5),
        ) {
            let mut names: Vec<SharedName> =
                names.into_iter().map(|(name, (of, part))| SharedName { name, of, part }).collect();
            let text = render_shared(&mut names);
            prop_assert_eq!(parse_shared(&text).unwrap(), names);
        }

        #[test]
        fn places_are_those_of_nested_loops(
            dims in proptest::collection::vec((1..5_u64, 0..9_u64), 3..4),
            begin in 0..9_u64,
        ) {
            let (shape, stride): (Vec<u64>, Vec<u64>) = dims.iter().copied().unzip();
            let part = Excerpt::new(shape.clone(), stride.clone(), begin).unwrap();
            prop_assert_eq!((part.shape(), part.stride(), part.begin()), (&*shape, &*stride, begin));
            let mut naive = Vec::new();
            for i in 0..dims[0].0 {
                for j in 0..dims[1].0 {
                    for k in 0..dims[2].0 {
                        naive.push(begin + i * dims[0].1 + j * dims[1].1 + k * dims[2].1);
                    }
                }
            }
            let places: Vec<u64> = (0..part.count()).map(|number| part.place(number)).collect();
            prop_assert_eq!(naive.iter().max().map(|last| last + 1), Some(part.end()));
            prop_assert_eq!(naive.iter().min(), Some(&part.begin()));
            let in_a_row = places.windows(2).all(|pair| pair[1] == pair[0] + 1);
            prop_assert_eq!(part.is_packed(), in_a_row);
            for by in 0..=begin {
                let moved = part.counted_from(by).unwrap();
                let there: Vec<u64> = (0..moved.count()).map(|number| moved.place(number) + by).collect();
                prop_assert_eq!(&there, &places);
            }
            prop_assert_eq!(part.counted_from(begin + 1), None);
            prop_assert_eq!(places, naive);
        }
    }

    #[test]
    fn rejects_text_that_is_not_a_record() {
        for text in [
            "",
            "[]",
            "{",
            r#"{"b":"a"}"#,
            r#"{"b":{}}"#,
            r#"{"b":{"of":1}}"#,
            r#"{"b":{"of":"a","of":"c"}}"#,
            r#"{"b":{"of":"a"},"\u0062":{"of":"a"}}"#,
            r#"{"b":{"of":"a","shape":[1]}}"#,
            r#"{"b":{"of":"a","shape":[1,1],"stride":[1],"begin":0}}"#,
            r#"{"b":{"of":"a","shape":[1],"stride":[true],"begin":0}}"#,
            r#"{"b":{"of":"a","shape":[1],"stride":[1.0],"begin":0}}"#,
            r#"{"b":{"of":"a","shape":[1],"stride":[1],"begin":-1}}"#,
            r#"{"b":{"of":"a","shape":[1],"stride":[1],"begin":9223372036854775808}}"#,
            r#"{"b":{"of":"a","shape":[0],"stride":[1],"begin":0}}"#,
            r#"{"b":{"of":"a","shape":[3,9223372036854775807],"stride":[0,0],"begin":0}}"#,
        ] {
            assert!(parse_shared(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_fault_names_its_tensor_if_it_concerns_one() {
        let fault = SharedError::about("b", "names itself");
        assert_eq!(fault.tensor(), Some("b"));
        assert!(fault.to_string().starts_with("tensor `b`: "), "{fault}");
        assert_eq!(parse_shared("[]").unwrap_err().tensor(), None);
    }

    #[test]
    fn errors_name_the_expected_value() {
        for (text, expected) in [
            ("[]", "an object from names to objects with `of`"),
            (r#"{"b":"a"}"#, "an object with `of`"),
            (
                r#"{"b":{"of":"a","shape":3,"stride":[1],"begin":0}}"#,
                "a list of integers from 0 on",
            ),
        ] {
            let said = parse_shared(text).unwrap_err().to_string();
            assert!(said.contains(&alloc::format!("expected {expected}")), "{said}");
        }
    }

    #[test]
    fn dimensions_beyond_the_limit_are_not_kept() {
        let dims = |count: usize| vec!["9223372036854775807"; count].join(",");
        let record = |count| {
            let dims = dims(count);
            alloc::format!(r#"{{"b":{{"of":"a","shape":[{dims}],"stride":[{dims}],"begin":0}}}}"#)
        };
        let said = parse_shared(&record(100_000)).unwrap_err().to_string();
        assert!(said.contains("more than 64 dimensions"), "{said}");
        assert!(Excerpt::new(vec![1; 64], vec![1; 64], 0).is_some());
        assert!(Excerpt::new(vec![1; 65], vec![1; 65], 0).is_none());
    }
}
