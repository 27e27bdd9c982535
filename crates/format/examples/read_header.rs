//! Reads only the header of a file, regardless of the file's size, and prints a table of its tensors.
//!
//! `cargo run --example read_header -- model.safetensors`

use std::error::Error;
use std::fs::File;
use std::io::{self, Read, Write};

use ingot_format::{Escaped, Header, Limits};

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: read_header FILE")?;
    let file = File::open(path)?;
    let file_nbytes = file.metadata()?.len();
    let limits = Limits::default();

    // The first 8 bytes are the header's length, which is checked before anything is allocated.
    let mut head = Vec::new();
    (&file).take(8).read_to_end(&mut head)?;
    let head_nbytes = Header::head_nbytes(&head, file_nbytes, &limits)?;
    (&file).take(head_nbytes - 8).read_to_end(&mut head)?;
    let header = Header::parse(&head, file_nbytes, &limits)?;

    let mut out = io::stdout().lock();
    for entry in header.entries() {
        // A name may contain any text, including terminal control characters.
        let name = Escaped(entry.name).to_string();
        let (dtype, shape) = (entry.dtype.code(), format!("{:?}", entry.shape));
        writeln!(out, "{dtype:12} {shape:20} {:>14} bytes  {name}", entry.nbytes())?;
    }
    for (key, value) in header.metadata().into_iter().flat_map(|metadata| metadata.iter()) {
        writeln!(out, "{} = {}", Escaped(key), Escaped(value))?;
    }
    let (format, count) = (header.format(), header.len());
    writeln!(
        out,
        "{format}: {count} tensors, {file_nbytes} bytes of which {head_nbytes} are the header"
    )?;
    Ok(())
}
