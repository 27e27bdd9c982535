// tests/drop_in.rs includes this file twice, with `crate_in_use` as the name of each crate. Each program returns what it
// observed.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Write;
use std::num::NonZeroUsize;
use std::ops::Bound;

use crate_in_use::slice::{IndexOp, TensorIndexer};
use crate_in_use::tensor::{Dtype, Metadata, SafeTensorError, SafeTensors, TensorInfo, TensorView, View};
use crate_in_use::{serialize, serialize_to_file};

/// Imports every public item of upstream by every public path.
#[allow(unused_imports, reason = "it is compiled, and that is the test")]
mod names {
    use super::crate_in_use::slice::{
        IndexOp, InvalidSlice, SliceByteRanges, SliceIterator, SlicedShape, TensorIndexer, slice_byte_ranges,
    };
    use super::crate_in_use::tensor::{
        Dtype, Metadata, SafeTensorError, SafeTensors, TensorInfo, TensorView, View, serialize,
        serialize_to_file,
    };

    mod root {
        use super::super::crate_in_use::{
            Dtype, SafeTensorError, SafeTensors, View, serialize, serialize_to_file, slice, tensor,
        };
    }
}

fn bytes(elements: &[f32]) -> Vec<u8> {
    elements
        .iter()
        .flat_map(|element| element.to_le_bytes())
        .collect()
}

pub(crate) fn saves_and_loads() -> Result<String, SafeTensorError> {
    let weight = bytes(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let bias = bytes(&[0.5, -0.5]);
    let tensors = vec![
        ("weight", TensorView::new(Dtype::F32, vec![2, 3], &weight)?),
        ("bias", TensorView::new(Dtype::F32, vec![2], &bias)?),
    ];
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    serialize_to_file(tensors, None, &path)?;

    let buffer = std::fs::read(&path)?;
    let model = SafeTensors::deserialize(&buffer)?;
    let mut output = format!("{} tensors, empty: {}\n", model.len(), model.is_empty());
    let mut names = model.names();
    names.sort_unstable();
    for name in names {
        let tensor = model.tensor(name)?;
        let _ = writeln!(
            output,
            "{name} {:?} {:?} {:?}",
            tensor.dtype(),
            tensor.shape(),
            tensor.data()
        );
    }
    let mut tensors: Vec<(String, TensorView<'_>)> = model.tensors();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, tensor) in &tensors {
        let _ = writeln!(output, "{name} {tensor:?}");
    }
    let _ = writeln!(
        output,
        "{}",
        model
            .iter()
            .map(|(name, tensor)| name.len() + tensor.data().len())
            .sum::<usize>()
    );
    let _ = writeln!(output, "{buffer:?}");
    Ok(output)
}

struct Matrix {
    shape: Vec<usize>,
    elements: Vec<f32>,
}

impl View for &Matrix {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        bytes(&self.elements).into()
    }
    fn data_len(&self) -> usize {
        self.elements.len() * 4
    }
}

pub(crate) fn stores_its_own_type() -> Result<String, SafeTensorError> {
    let layers: HashMap<String, Matrix> = [("a", 1.0), ("b", 2.0)]
        .into_iter()
        .map(|(name, value)| {
            (
                name.to_string(),
                Matrix {
                    shape: vec![1, 2],
                    elements: vec![value; 2],
                },
            )
        })
        .collect();
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let buffer = serialize(layers.iter(), Some(metadata))?;
    Ok(format!("{buffer:?}"))
}

pub(crate) fn stores_a_map() -> Result<String, SafeTensorError> {
    let data = bytes(&[1.0, 2.0]);
    let mut tensors: HashMap<String, TensorView<'_>> = HashMap::new();
    for name in ["x", "y", "z"] {
        tensors.insert(name.to_string(), TensorView::new(Dtype::F32, vec![2], &data)?);
    }
    let owned = serialize(&tensors, None)?;
    assert_eq!(owned, serialize(tensors, None)?);
    Ok(format!("{owned:?}"))
}

fn a_file() -> Result<Vec<u8>, SafeTensorError> {
    let data: Vec<u8> = (0..24).collect();
    let tensors = [
        ("attention", TensorView::new(Dtype::BF16, vec![3, 4], &data)?),
        ("embedding", TensorView::new(Dtype::U8, vec![4, 6], &data)?),
        ("scale", TensorView::new(Dtype::F64, vec![], &data[..8])?),
    ];
    serialize(
        tensors,
        Some(HashMap::from([("step".to_string(), "7".to_string())])),
    )
}

pub(crate) fn lists_a_file() -> Result<String, SafeTensorError> {
    let buffer = a_file()?;
    let (header_nbytes, metadata) = SafeTensors::read_metadata(&buffer)?;
    let mut output = format!(
        "{header_nbytes} {} {:?}\n",
        metadata.data_len(),
        metadata.offset_keys()
    );
    if let Some(text) = metadata.metadata() {
        let _ = writeln!(output, "{:?}", text.get("step").map(String::as_str));
    }
    for name in metadata.offset_keys() {
        let info: &TensorInfo = metadata.info(&name).expect("it is listed");
        let _ = writeln!(
            output,
            "{name}: {:?} {:?} {:?}",
            info.dtype, info.shape, info.data_offsets
        );
    }
    let total: usize = metadata
        .tensors()
        .values()
        .map(|info| info.shape.iter().product::<usize>())
        .sum();
    let _ = writeln!(output, "{total} {:?}", metadata.info("nothing").is_none());
    Ok(output)
}

pub(crate) fn reads_only_the_header() -> Result<String, SafeTensorError> {
    let buffer = a_file()?;
    let length = u64::from_le_bytes(buffer[..8].try_into().expect("eight bytes"));
    let header = &buffer[8..8 + usize::try_from(length).expect("it lies in memory")];
    let metadata: Metadata = serde_json::from_slice(header).expect("a header");
    let again = serde_json::to_string(&metadata).expect("a header");
    let info = serde_json::to_string(metadata.info("scale").expect("it is there")).expect("an entry");
    Ok(format!(
        "{again} {info} {}",
        serde_json::to_string(&Dtype::BF16).expect("a string")
    ))
}

pub(crate) fn makes_a_header() -> Result<String, SafeTensorError> {
    let info = |begin, end| TensorInfo {
        dtype: Dtype::I16,
        shape: vec![(end - begin) / 2],
        data_offsets: (begin, end),
    };
    let metadata = Metadata::new(
        None,
        vec![
            ("first".to_string(), info(0, 8)),
            ("second".to_string(), info(8, 10)),
        ],
    )?;
    let hole = Metadata::new(
        None,
        vec![
            ("first".to_string(), info(0, 8)),
            ("second".to_string(), info(10, 12)),
        ],
    );
    Ok(format!(
        "{:?} {:?} {}",
        metadata.offset_keys(),
        metadata.metadata(),
        hole.is_err()
    ))
}

pub(crate) fn takes_columns() -> Result<String, SafeTensorError> {
    let buffer = a_file()?;
    let model = SafeTensors::deserialize(&buffer)?;
    let tensor = model.tensor("embedding")?;
    let mut output = String::new();
    let slices = [
        tensor.slice(2),
        tensor.slice(1..3),
        tensor.slice(..),
        tensor.slice((.., 2..4)),
        tensor.slice((1.., ..=3)),
        tensor.slice((0, 5)),
        tensor.slice((..2, ..)),
        tensor.slice(7),
        tensor.slice((.., 3..9)),
        tensor.slice((.., .., ..)),
    ];
    for slice in slices {
        match slice {
            Ok(parts) => {
                let (shape, expected) = (parts.newshape(), parts.remaining_byte_len());
                let taken: Vec<u8> = parts.into_iter().flat_map(<[u8]>::to_vec).collect();
                let _ = writeln!(output, "{shape:?} {expected} {taken:?}");
            }
            Err(fault) => {
                let _ = writeln!(output, "{fault:?}");
            }
        }
    }
    Ok(output)
}

pub(crate) fn shards_by_rank() -> Result<String, SafeTensorError> {
    let buffer = a_file()?;
    let model = SafeTensors::deserialize(&buffer)?;
    let tensor = model.tensor("attention")?;
    let mut output = String::new();
    for rank in 0..2 {
        let part = TensorIndexer::Narrow(
            Bound::Included(rank * 2),
            Bound::Excluded(rank * 2 + 2),
            NonZeroUsize::MIN,
        );
        let _ = write!(output, "{part} ");
        let slices = [TensorIndexer::from(..), part];
        let parts = tensor.sliced_data(&slices).expect("it divides");
        let shape = parts.newshape();
        let data = parts.collect::<Vec<_>>().concat();
        let _ = writeln!(output, "{:?}", TensorView::new(tensor.dtype(), shape, &data)?);
    }
    Ok(output)
}

pub(crate) fn looks_at_errors() -> Result<String, SafeTensorError> {
    let buffer = a_file()?;
    let model = SafeTensors::deserialize(&buffer)?;
    let missing = match model.tensor("nothing") {
        Err(SafeTensorError::TensorNotFound(name)) => name,
        other => panic!("{other:?}"),
    };
    let wrong = match TensorView::new(Dtype::F32, vec![2], &[0; 7]) {
        Err(SafeTensorError::InvalidTensorView(dtype, shape, len)) => format!("{dtype} {shape:?} {len}"),
        other => panic!("{other:?}"),
    };
    let tensors = [("scale", model.tensor("scale")?)];
    let absent = match serialize_to_file(tensors, None, std::path::Path::new("/no/such/folder/x")) {
        Err(SafeTensorError::IoError(fault)) => fault.kind(),
        other => panic!("{other:?}"),
    };
    let cut = SafeTensors::deserialize(&buffer[..buffer.len() - 1]).is_err();
    Ok(format!("{missing} {wrong} {absent} {cut}"))
}

pub(crate) fn boxes_errors() -> Result<String, Box<dyn std::error::Error + Send + Sync>> {
    fn first_row(buffer: &[u8]) -> Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync>> {
        let model = SafeTensors::deserialize(buffer)?;
        let tensor = model.tensor("embedding")?;
        Ok(tensor.slice(0)?.flatten().copied().collect())
    }
    let row = first_row(&a_file()?)?;
    Ok(format!("{row:?} {}", first_row(b"short").is_err()))
}

pub(crate) fn sorts_dtypes() -> Result<String, SafeTensorError> {
    let mut dtypes = [
        Dtype::U64,
        Dtype::BOOL,
        Dtype::F4,
        Dtype::F8_E4M3,
        Dtype::BF16,
        Dtype::F32,
        Dtype::C64,
    ];
    dtypes.sort_unstable();
    let sizes: Vec<String> = dtypes
        .iter()
        .map(|dtype| format!("{dtype} {dtype:?} {}", dtype.bitsize()))
        .collect();
    Ok(sizes.join("\n"))
}

pub(crate) fn slice_of(ranges: &[(usize, usize, usize, usize)]) -> (Vec<usize>, usize, Vec<u8>) {
    let shape: Vec<usize> = ranges.iter().map(|range| range.0).collect();
    let data: Vec<u8> = (0..=u8::MAX).cycle().take(shape.iter().product()).collect();
    let slices: Vec<TensorIndexer> = ranges
        .iter()
        .map(|&(_, begin, end, step)| {
            let step = NonZeroUsize::new(step).expect("steps begin at 1");
            TensorIndexer::Narrow(Bound::Included(begin), Bound::Excluded(end), step)
        })
        .collect();
    let tensor = TensorView::new(Dtype::U8, shape, &data).expect("as many bytes as the shape needs");
    let parts = tensor
        .sliced_data(&slices)
        .expect("ranges within their dimensions");
    (
        parts.newshape(),
        parts.remaining_byte_len(),
        parts.flatten().copied().collect(),
    )
}
