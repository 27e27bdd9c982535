//! An ordinary program that uses candle. It is built twice: with the safetensors crate, and with ingot in its place.

use std::path::Path;

use candle_core::safetensors::{BufferedSafetensors, MmapedSafetensors, SliceSafetensors};
use candle_core::{DType, Device, Error, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};

const CPU: Device = Device::Cpu;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["save-model", path] => save_model(path.as_ref()),
        ["load-model", path] => load_model(path.as_ref()),
        ["save-dtypes", path] => save_dtypes(path.as_ref()),
        ["load-each-way", path] => load_each_way(path.as_ref()),
        _ => Err(Error::Msg(format!("no such command: {arguments:?}"))),
    };
    if let Err(fault) = done {
        // Only the kind of error: the messages may differ.
        println!("refused: {}", kind(&fault));
    }
}

fn kind(fault: &Error) -> &'static str {
    match fault {
        Error::SafeTensor(_) => "SafeTensor",
        Error::WithPath { inner, .. } | Error::WithBacktrace { inner, .. } | Error::Context { inner, .. } => {
            kind(inner)
        }
        Error::Io(_) => "Io",
        Error::CannotFindTensor { .. } => "CannotFindTensor",
        _ => "other",
    }
}

/// Run a small network. `vb` has its weights, or draws them at random.
fn run(vb: &VarBuilder<'_>) -> Result<Tensor> {
    let embedding = candle_nn::embedding(50, 16, vb.pp("embedding"))?;
    let norm = candle_nn::layer_norm(16, 1e-5, vb.pp("norm"))?;
    let up = candle_nn::linear(16, 33, vb.pp("mlp.up"))?;
    let down = candle_nn::linear_no_bias(33, 16, vb.pp("mlp.down"))?;
    let conv = candle_nn::conv1d(4, 3, 3, candle_nn::Conv1dConfig::default(), vb.pp("conv"))?;
    let ids = Tensor::new(&[[3_u32, 1, 4, 1], [5, 9, 2, 6]], &CPU)?;
    let hidden = norm.forward(&embedding.forward(&ids)?)?;
    let hidden = (down.forward(&up.forward(&hidden)?.gelu()?)? + hidden)?;
    conv.forward(&hidden)
}

fn save_model(path: &Path) -> Result<()> {
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &CPU);
    run(&vb)?;
    // candle's random numbers have no seed, and both programs need the same weights.
    for (name, variable) in variables.data().lock().unwrap().iter() {
        let count = variable.elem_count();
        let salt = name.bytes().map(f64::from).sum::<f64>();
        let values: Vec<f32> = (0..count)
            .map(|at| (((at as f64) * 0.7 + salt).sin() / 3.0) as f32)
            .collect();
        variable.set(&Tensor::from_vec(values, variable.shape(), &CPU)?)?;
    }
    variables.save(path)
}

fn load_model(path: &Path) -> Result<()> {
    let bytes = std::fs::read(path)?;
    // SAFETY: no process writes to the file while it is mapped; the test made it for this.
    let mapped = unsafe { VarBuilder::from_mmaped_safetensors(&[path], DType::F32, &CPU)? };
    println!("mapped {}", run(&mapped)?);
    println!(
        "buffered {}",
        run(&VarBuilder::from_buffered_safetensors(
            bytes.clone(),
            DType::F32,
            &CPU
        )?)?
    );
    println!(
        "slice {}",
        run(&VarBuilder::from_slice_safetensors(&bytes, DType::F32, &CPU)?)?
    );
    println!(
        "as F16 {}",
        run(&VarBuilder::from_slice_safetensors(&bytes, DType::F16, &CPU)?.to_dtype(DType::F32))?
    );
    let mut variables = VarMap::new();
    run(&VarBuilder::from_varmap(&variables, DType::F32, &CPU))?;
    variables.load(path)?;
    println!(
        "variables {}",
        run(&VarBuilder::from_varmap(&variables, DType::F32, &CPU))?
    );
    let again = path.with_extension("again");
    variables.save(&again)?;
    println!("saved again: {}", std::fs::read(again)? == bytes);
    println!("absent: {}", kind(&mapped.get(3, "absent").unwrap_err()));
    Ok(())
}

fn save_dtypes(path: &Path) -> Result<()> {
    let line = Tensor::arange(0_f32, 24.0, &CPU)?.reshape((2, 3, 4))?;
    let mut tensors = std::collections::HashMap::new();
    for dtype in [
        DType::U8,
        DType::U32,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::BF16,
        DType::F16,
        DType::F32,
        DType::F64,
        DType::F8E4M3,
    ] {
        tensors.insert(format!("{}", dtype.as_str()), line.to_dtype(dtype)?);
    }
    tensors.insert("transposed".to_owned(), line.transpose(0, 2)?);
    tensors.insert("scalar".to_owned(), Tensor::new(2.5_f64, &CPU)?);
    tensors.insert("empty".to_owned(), Tensor::zeros((0, 3), DType::F32, &CPU)?);
    tensors.insert("a name of a\nkind — \u{1F600}".to_owned(), line.narrow(1, 1, 1)?);
    candle_core::safetensors::save(&tensors, path)?;
    line.save_safetensors("alone", path.with_extension("alone"))
}

fn load_each_way(path: &Path) -> Result<()> {
    let bytes = std::fs::read(path)?;
    tell("load", candle_core::safetensors::load(path, &CPU)?);
    tell(
        "load_buffer",
        candle_core::safetensors::load_buffer(&bytes, &CPU)?,
    );
    // SAFETY: as in `load_model`.
    let mapped = unsafe { MmapedSafetensors::multi(&[path])? };
    let buffered = BufferedSafetensors::new(bytes.clone())?;
    let slice = SliceSafetensors::new(&bytes)?;
    let mut names: Vec<String> = mapped.tensors().into_iter().map(|(name, _)| name).collect();
    names.sort();
    for name in &names {
        println!(
            "{name:?} {:?} {:?}",
            mapped.get(name)?.dtype(),
            mapped.get(name)?.shape()
        );
        let [a, b, c] = [
            mapped.load(name, &CPU)?,
            buffered.load(name, &CPU)?,
            slice.load(name, &CPU)?,
        ];
        println!("{a}\n{b}\n{c}");
    }
    println!("absent: {}", kind(&mapped.get("absent").unwrap_err()));
    Ok(())
}

fn tell(way: &str, tensors: impl IntoIterator<Item = (String, Tensor)>) {
    let mut tensors: Vec<_> = tensors.into_iter().collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, tensor) in tensors {
        println!("{way} {name:?} {tensor}");
    }
}
