//! The index of a sharded checkpoint: a map from tensors to files.

mod error;
mod headers;
mod shard_name;
mod value;

use alloc::borrow::{Cow, ToOwned};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::str;

pub use error::{IndexError, ShardNameFault};
pub use headers::ShardHeaders;

use crate::codec::json::{plain_nbytes, string};
use crate::extent::{index, to_u32, to_u64, to_usize};
use crate::metadata::METADATA_KEY;
use crate::name_order::{SameName, order};
use error::invalid_json;
use value::{Kind, Value};

/// An index that keeps rules I1 to I8 of FORMAT.md: every name is unique, and every shard name is a path that stays
/// below the index. Whether the shards really hold these tensors is checked when they are opened.
///
/// Names are stored back to back in one arena and shards are numbered, so that an index costs a few allocations instead
/// of several per tensor.
///
/// ```
/// use ingot_format::ShardIndex;
///
/// let index = ShardIndex::parse(br#"{"weight_map": {"wte": "model-00001-of-00002.safetensors"}}"#)?;
/// assert_eq!(index.shards(), ["model-00001-of-00002.safetensors"]);
/// # Ok::<(), ingot_format::IndexError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ShardIndex {
    names: String,
    records: Vec<IndexRecord>,
    shards: Vec<String>,
    metadata: Option<Value>,
    /// Tensors in name order; empty if that is the order of the file.
    by_name: Vec<u32>,
}

/// One tensor. Its name ends at `name_end` and begins where the previous one ends.
#[derive(Clone, Copy, Debug)]
struct IndexRecord {
    name_end: u32,
    shard: u32,
}

impl ShardIndex {
    /// Largest index that is read, in bytes; the limit of the Hub's own reader. The largest known index has 60 MB, for
    /// 497,000 tensors.
    pub const NBYTES: u64 = 250_000_000;
    /// Most shards that an index may name: ten times the limit of the Hub's own reader. Each shard is an open file.
    pub const SHARDS: usize = 100_000;
    /// Largest value beside the weight map, in bytes. Real ones have less than a hundred bytes; a reader needs several
    /// times the size of such a value in memory.
    pub const VALUE_NBYTES: usize = 4 << 20;

    /// Parses an index that is in memory as a whole.
    ///
    /// ```
    /// use ingot_format::ShardIndex;
    /// let index = ShardIndex::parse(br#"{"weight_map": {"wte": "model-00001-of-00002.safetensors"}}"#)?;
    /// assert_eq!(index.shard_of("wte"), Some("model-00001-of-00002.safetensors"));
    /// # Ok::<(), ingot_format::IndexError>(())
    /// ```
    ///
    /// # Errors
    /// The first rule of FORMAT.md that the index breaks.
    pub fn parse(bytes: &[u8]) -> Result<ShardIndex, IndexError> {
        let mut reader = IndexReader::new(to_u64(bytes.len()))?;
        reader.feed(bytes)?;
        reader.finish()
    }

    /// Returns the number of tensors.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Returns whether there are no tensors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Returns the shards' file names, as the index spells them, sorted.
    #[must_use]
    pub fn shards(&self) -> &[String] {
        &self.shards
    }

    /// Iterates over all tensors in the order of the index, each with the number of its shard.
    pub fn entries(&self) -> impl Iterator<Item = (&str, usize)> {
        let mut begin = 0;
        self.records.iter().map(move |record| {
            let name = index(begin)..index(record.name_end);
            begin = record.name_end;
            (&self.names[name], index(record.shard))
        })
    }

    /// Returns the tensor with index `number` in the order of the index, and the number of its shard.
    ///
    /// # Panics
    /// If there are not that many tensors.
    #[must_use]
    pub fn entry(&self, number: usize) -> (&str, usize) {
        (self.name(number), index(self.records[number].shard))
    }

    /// Returns the position in the index of the tensor that is at `rank` in byte order of the names.
    #[must_use]
    pub fn nth_by_name(&self, rank: usize) -> usize {
        self.by_name.get(rank).map_or(rank, |&number| index(number))
    }

    /// Iterates over all names in byte order.
    pub fn names_by_name(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|rank| self.name(self.nth_by_name(rank)))
    }

    /// Returns the position of the tensor `name` in the index.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<usize> {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.name(self.nth_by_name(middle)).cmp(name) {
                core::cmp::Ordering::Less => low = middle + 1,
                core::cmp::Ordering::Greater => high = middle,
                core::cmp::Ordering::Equal => return Some(self.nth_by_name(middle)),
            }
        }
        None
    }

    /// Checks rule I6 for an index behind a URL. There, file names become parts of URLs, which servers decode: `%2e%2e`
    /// is a valid file name on a disk, but leaves the folder on a server.
    ///
    /// # Errors
    /// [`IndexError::InvalidShardName`].
    pub fn check_in_urls(&self) -> Result<(), IndexError> {
        for (number, shard) in self.shards.iter().enumerate() {
            shard_name::check_decoded(shard).map_err(|fault| IndexError::InvalidShardName {
                tensor: self.tensor_in(number).to_owned(),
                shard: shard.clone(),
                fault,
            })?;
        }
        Ok(())
    }

    /// Returns the first tensor in the shard of this number.
    fn tensor_in(&self, shard: usize) -> &str {
        let found = self.entries().find(|entry| entry.1 == shard);
        found.map_or("", |entry| entry.0)
    }

    /// Renders the index as JSON, with the tensors in the same order.
    #[must_use]
    pub fn render(&self) -> Vec<u8> {
        let mut out = Vec::from(*b"{");
        if let Some(metadata) = self.metadata() {
            string("metadata", &mut out);
            out.push(b':');
            out.extend_from_slice(metadata.as_bytes());
            out.push(b',');
        }
        string("weight_map", &mut out);
        out.extend_from_slice(b":{");
        for (place, (name, shard)) in self.entries().enumerate() {
            if place > 0 {
                out.push(b',');
            }
            string(name, &mut out);
            out.push(b':');
            string(&self.shards[shard], &mut out);
        }
        out.extend_from_slice(b"}}");
        out
    }

    /// Returns the file that holds the tensor `name`.
    #[must_use]
    pub fn shard_of(&self, name: &str) -> Option<&str> {
        let number = self.find(name)?;
        Some(&self.shards[index(self.records[number].shard)])
    }

    /// Returns the index's metadata, a JSON object in the spelling of the file. Its values need not be strings.
    #[must_use]
    pub fn metadata(&self) -> Option<&str> {
        let value = self.metadata.as_ref().filter(|value| value.kind == Kind::Object);
        value.map(|value| value.text.as_str())
    }

    /// Returns the total size of all tensors according to the metadata, which is not checked.
    #[must_use]
    pub fn total_nbytes(&self) -> Option<u64> {
        self.metadata.as_ref().and_then(|value| value.total_size)
    }

    /// Adds a tensor. Not inlined, so that the reading loop keeps its registers: an index of 497,000 names is read 5 %
    /// faster (2026-11).
    #[inline(never)]
    fn push(&mut self, name: &str, shard: u32) {
        self.names.push_str(name);
        let name_end = to_u32(self.names.len());
        self.records.push(IndexRecord { name_end, shard });
    }

    fn name(&self, number: usize) -> &str {
        let begin = number
            .checked_sub(1)
            .map_or(0, |before| self.records[before].name_end);
        &self.names[index(begin)..index(self.records[number].name_end)]
    }
}

/// Reads an index piece by piece, in one pass, so that the whole index is never in memory.
///
/// ```
/// use ingot_format::IndexReader;
/// let text = br#"{"weight_map": {"wte": "a.safetensors"}}"#;
/// let mut reader = IndexReader::new(text.len() as u64)?;
/// let taken = reader.feed(&text[..25])?;
/// assert_eq!(taken, 16, "the brace of the weight map; the tensor is not yet whole");
/// reader.feed(&text[taken..])?;
/// assert_eq!(reader.finish()?.len(), 1);
/// # Ok::<(), ingot_format::IndexError>(())
/// ```
#[derive(Debug)]
pub struct IndexReader {
    index: ShardIndex,
    state: ReaderState,
    has_weight_map: bool,
    /// Names of the other fields.
    unknown: BTreeSet<String>,
    numbers: BTreeMap<String, u32>,
    /// Bytes read so far, and bytes of the whole index.
    taken: u64,
    nbytes: u64,
}

/// What an index reader expects next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReaderState {
    Start,
    /// A field of the outer object, or its end if it has no field yet.
    Field {
        first: bool,
    },
    /// A tensor of the weight map, or likewise its end.
    Tensor {
        first: bool,
    },
    /// A comma, or the end of the outer object.
    AfterField,
    End,
}

/// Why a step failed.
enum Stop {
    /// The text ends within the item.
    Cut,
    Fault(IndexError),
}

impl From<IndexError> for Stop {
    fn from(fault: IndexError) -> Stop {
        Stop::Fault(fault)
    }
}

impl IndexReader {
    /// Creates a reader for an index of `nbytes`.
    ///
    /// # Errors
    /// Rule I1.
    pub fn new(nbytes: u64) -> Result<IndexReader, IndexError> {
        // The least that common writers use per record. Reserved memory that is never written to occupies no pages.
        const USUAL_TENSOR_NBYTES: usize = 96;
        if nbytes > ShardIndex::NBYTES {
            return Err(IndexError::TooLarge {
                found: nbytes,
                limit: ShardIndex::NBYTES,
            });
        }
        let text = to_usize(nbytes).unwrap_or(0);
        let mut index = ShardIndex::default();
        index.names.reserve(text / 2);
        index.records.reserve(text / USUAL_TENSOR_NBYTES);
        Ok(IndexReader {
            index,
            state: ReaderState::Start,
            has_weight_map: false,
            unknown: BTreeSet::new(),
            numbers: BTreeMap::new(),
            taken: 0,
            nbytes,
        })
    }

    /// Reads the complete items in `bytes`, which begin where the bytes read so far end. Returns the number of bytes
    /// read; the rest must be passed again with more bytes after it.
    ///
    /// # Errors
    /// The rule that the index breaks.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<usize, IndexError> {
        let is_last = self.taken + to_u64(bytes.len()) >= self.nbytes;
        let text = match str::from_utf8(bytes) {
            Ok(text) => text,
            // A character cut in two is passed again.
            Err(fault) if fault.error_len().is_none() && !is_last => {
                str::from_utf8(&bytes[..fault.valid_up_to()]).unwrap_or_default()
            }
            Err(fault) => {
                return Err(IndexError::InvalidUtf8 {
                    position: self.taken + to_u64(fault.valid_up_to()),
                });
            }
        };
        let mut cursor = Cursor {
            text,
            at: 0,
            base: self.taken,
        };
        let mut done = 0;
        let stop = loop {
            match self.step(&mut cursor) {
                Ok(()) => done = cursor.at,
                Err(stop) => break stop,
            }
        };
        if self.state == ReaderState::End {
            // Only white space is left.
            done = cursor.at;
        }
        self.taken += to_u64(done);
        match stop {
            Stop::Fault(fault) => Err(fault),
            Stop::Cut if is_last && self.state == ReaderState::End && done == text.len() => Ok(done),
            Stop::Cut if is_last => Err(IndexError::InvalidJson {
                reason: "it ends before the object does".into(),
            }),
            Stop::Cut => Ok(done),
        }
    }

    /// Returns the index once all of it was read.
    ///
    /// # Errors
    /// Rules I4, I5 and I8, and I3 if the end is missing.
    pub fn finish(self) -> Result<ShardIndex, IndexError> {
        if self.state != ReaderState::End {
            return Err(IndexError::InvalidJson {
                reason: "it ends before the object does".into(),
            });
        }
        if !self.has_weight_map {
            return Err(IndexError::MissingWeightMap);
        }
        let mut index = self.index;
        // Sorted by name, so that the order does not depend on the writer of the index.
        let mut new_numbers = alloc::vec![0; index.shards.len()];
        index.shards.clear();
        for (rank, (shard, number)) in self.numbers.into_iter().enumerate() {
            new_numbers[crate::extent::index(number)] = to_u32(rank);
            index.shards.push(shard);
        }
        shard_name::refuse_collisions(&index.shards)?;
        if !new_numbers.is_sorted() {
            for record in &mut index.records {
                record.shard = new_numbers[crate::extent::index(record.shard)];
            }
        }
        index.by_name = order_by_name(&index)?;
        Ok(index)
    }

    /// Reads one item with its punctuation. An incomplete item changes nothing.
    #[inline]
    fn step(&mut self, cursor: &mut Cursor<'_>) -> Result<(), Stop> {
        match self.state {
            ReaderState::Tensor { first } => self.tensor(cursor, first),
            ReaderState::Start => {
                cursor.expect(b'{', "an object")?;
                self.state = ReaderState::Field { first: true };
                Ok(())
            }
            ReaderState::Field { first } => self.field(cursor, first),
            ReaderState::AfterField => {
                self.state = match cursor.next()? {
                    b',' => ReaderState::Field { first: false },
                    b'}' => ReaderState::End,
                    _ => return Err(cursor.unexpected("`,` or `}`")),
                };
                Ok(())
            }
            ReaderState::End => {
                cursor.next()?;
                Err(cursor.unexpected("nothing after the object"))
            }
        }
    }

    fn field(&mut self, cursor: &mut Cursor<'_>, first: bool) -> Result<(), Stop> {
        if cursor.peek()? == b'}' && first {
            cursor.at += 1;
            self.state = ReaderState::End;
            return Ok(());
        }
        let field = cursor.string("a field's name")?;
        cursor.expect(b':', "`:`")?;
        match &*field {
            "weight_map" => {
                if self.has_weight_map {
                    return Err(duplicate_field(field));
                }
                if cursor.peek()? != b'{' {
                    let found = cursor.value("weight_map")?.kind;
                    return Err(invalid_field("weight_map", found));
                }
                cursor.at += 1;
                self.has_weight_map = true;
                self.state = ReaderState::Tensor { first: true };
            }
            "metadata" => {
                if self.index.metadata.is_some() {
                    return Err(duplicate_field(field));
                }
                let value = cursor.value("metadata")?;
                if let Some(key) = value.duplicate {
                    return Err(IndexError::DuplicateMetadataKey { key }.into());
                }
                if !matches!(value.kind, Kind::Object | Kind::Null) {
                    return Err(invalid_field("metadata", value.kind));
                }
                self.index.metadata = Some(value);
                self.state = ReaderState::AfterField;
            }
            _ => {
                cursor.value(&field)?;
                if !self.unknown.insert((*field).to_owned()) {
                    return Err(duplicate_field(field));
                }
                self.state = ReaderState::AfterField;
            }
        }
        Ok(())
    }

    /// `"name": "file"` with the comma or the brace after it.
    #[inline]
    fn tensor(&mut self, cursor: &mut Cursor<'_>, first: bool) -> Result<(), Stop> {
        if first && cursor.peek()? == b'}' {
            cursor.at += 1;
            self.state = ReaderState::AfterField;
            return Ok(());
        }
        let name = cursor.string("a tensor's name")?;
        cursor.expect(b':', "`:`")?;
        if cursor.peek()? != b'"' {
            let found = cursor.value(&name)?.kind;
            return Err(Stop::Fault(IndexError::InvalidShard {
                tensor: name.into_owned(),
                found: found.words(),
            }));
        }
        // Neighbours are usually in the same file.
        let last = self.index.records.last().map_or(0, |record| record.shard);
        let shard = match self.index.shards.get(index(last)) {
            Some(shard) if cursor.take_quoted(shard) => last,
            _ => {
                let shard = cursor.string("a file's name")?;
                // Not before the comma, so that an incomplete item changes nothing.
                cursor.peek()?;
                self.number_of(&shard, &name)?
            }
        };
        self.state = match cursor.next()? {
            b',' => ReaderState::Tensor { first: false },
            b'}' => ReaderState::AfterField,
            _ => return Err(cursor.unexpected("`,` or `}`")),
        };
        if name == METADATA_KEY {
            return Err(IndexError::ReservedName.into());
        }
        self.index.push(&name, shard);
        Ok(())
    }

    /// Returns the number of the shard of this name. Rules I6 and I7.
    fn number_of(&mut self, shard: &str, tensor: &str) -> Result<u32, IndexError> {
        if let Some(&number) = self.numbers.get(shard) {
            return Ok(number);
        }
        shard_name::check(shard).map_err(|fault| IndexError::InvalidShardName {
            tensor: tensor.to_owned(),
            shard: shard.to_owned(),
            fault,
        })?;
        if self.index.shards.len() == ShardIndex::SHARDS {
            return Err(IndexError::TooManyShards {
                limit: to_u64(ShardIndex::SHARDS),
            });
        }
        let number = to_u32(self.index.shards.len());
        self.index.shards.push(shard.to_owned());
        self.numbers.insert(shard.to_owned(), number);
        Ok(number)
    }
}

fn duplicate_field(field: Cow<'_, str>) -> Stop {
    Stop::Fault(IndexError::DuplicateField {
        field: field.into_owned(),
    })
}

fn invalid_field(field: &'static str, found: Kind) -> Stop {
    Stop::Fault(IndexError::InvalidField {
        field,
        found: found.words(),
    })
}

/// Checks rule I4 for names. Returns their order, empty if it is the order of the file.
fn order_by_name(read: &ShardIndex) -> Result<Vec<u32>, IndexError> {
    if read.entries().is_sorted_by(|a, b| a.0 < b.0) {
        return Ok(Vec::new());
    }
    order(&read.names, read.records.iter().map(|record| record.name_end)).map_err(
        |SameName(first, second)| {
            let shard = |number: usize| read.shards[read.entry(number).1].clone();
            IndexError::DuplicateTensor {
                tensor: read.name(first).to_owned(),
                shards: (shard(first), shard(second)),
            }
        },
    )
}

/// The text being read, and the position in it.
struct Cursor<'a> {
    text: &'a str,
    at: usize,
    /// Bytes of the index before `text`.
    base: u64,
}

impl<'a> Cursor<'a> {
    /// Returns the next byte that is not white space, without consuming it.
    #[inline]
    fn peek(&mut self) -> Result<u8, Stop> {
        let bytes = self.text.as_bytes();
        while let Some(&byte) = bytes.get(self.at) {
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Ok(byte);
            }
            self.at += 1;
        }
        Err(Stop::Cut)
    }

    #[inline]
    fn next(&mut self) -> Result<u8, Stop> {
        let byte = self.peek()?;
        self.at += 1;
        Ok(byte)
    }

    #[inline]
    fn expect(&mut self, byte: u8, words: &'static str) -> Result<(), Stop> {
        if self.next()? == byte {
            Ok(())
        } else {
            Err(self.unexpected(words))
        }
    }

    /// Returns the fault of the byte that was consumed last.
    #[cold]
    fn unexpected(&self, expected: &str) -> Stop {
        let at = self.at.saturating_sub(1);
        let found = self.text.get(at..).and_then(|rest| rest.chars().next());
        invalid_json(self.base + to_u64(at), expected, found).into()
    }

    /// Consumes `text` with its quotes if the input continues with it.
    #[inline]
    fn take_quoted(&mut self, text: &str) -> bool {
        let rest = self.text.as_bytes().get(self.at..).unwrap_or_default();
        let after = rest
            .strip_prefix(b"\"")
            .and_then(|rest| rest.strip_prefix(text.as_bytes()))
            .and_then(|rest| rest.strip_prefix(b"\""));
        if let Some(after) = after {
            self.at = self.text.len() - after.len();
        }
        after.is_some()
    }

    /// Reads a string and resolves its escapes.
    #[inline]
    fn string(&mut self, words: &'static str) -> Result<Cow<'a, str>, Stop> {
        self.expect(b'"', words)?;
        let body = self.text.get(self.at..).unwrap_or_default();
        let nbytes = plain_nbytes(body.as_bytes());
        match body.as_bytes().get(nbytes) {
            Some(b'"') => {
                self.at += nbytes + 1;
                Ok(Cow::Borrowed(&body[..nbytes]))
            }
            Some(_) => self.escaped_string().map(Cow::Owned),
            None => Err(Stop::Cut),
        }
    }

    /// Reads a string after its opening quote. serde_json resolves the escapes and reports invalid ones.
    #[cold]
    fn escaped_string(&mut self) -> Result<String, Stop> {
        let quoted = self.text.get(self.at - 1..).unwrap_or_default();
        let mut strings = serde_json::Deserializer::from_str(quoted).into_iter::<String>();
        match strings.next() {
            Some(Ok(text)) => {
                self.at += strings.byte_offset() - 1;
                Ok(text)
            }
            Some(Err(fault)) if !fault.is_eof() => Err(self.fault(&fault)),
            _ => Err(Stop::Cut),
        }
    }

    /// Reads any value, without consuming the byte after it.
    fn value(&mut self, field: &str) -> Result<Value, Stop> {
        let rest = self.text.get(self.at..).unwrap_or_default();
        // Bytes after a longer value are not examined, so that reading one through a growing window stays linear.
        if rest.len() <= ShardIndex::VALUE_NBYTES {
            return self.value_in(rest);
        }
        let end = (0..=ShardIndex::VALUE_NBYTES)
            .rev()
            .find(|&end| rest.is_char_boundary(end))
            .unwrap_or(0);
        match self.value_in(&rest[..end]) {
            Err(Stop::Cut) => Err(Stop::Fault(IndexError::ValueTooLarge {
                field: field.to_owned(),
                limit: to_u64(ShardIndex::VALUE_NBYTES),
            })),
            other => other,
        }
    }

    fn value_in(&mut self, rest: &str) -> Result<Value, Stop> {
        match Value::at_start_of(rest) {
            Some(Ok((value, nbytes))) => {
                self.at += nbytes;
                Ok(value)
            }
            Some(Err(fault)) => Err(self.fault(&fault)),
            None => Err(Stop::Cut),
        }
    }

    fn fault(&self, fault: &serde_json::Error) -> Stop {
        Stop::Fault(IndexError::InvalidJson {
            reason: alloc::format!("after byte {}: {fault}", self.base + to_u64(self.at)),
        })
    }
}

#[cfg(test)]
mod tests;
