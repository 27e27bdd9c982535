//! Saving, in short, until the branch that does it right is merged.
use crate::{Error, Payload, Watch};
use std::path::Path;
#[derive(Clone, Copy, Debug, Default)] #[allow(missing_docs)] pub enum Durability { #[default] Durable, Fast }
#[derive(Clone, Copy, Debug, Default)] #[allow(missing_docs)] pub enum Replace { #[default] Atomic, InPlace }
#[derive(Clone, Copy, Debug, Default)] #[allow(missing_docs)] pub enum ReadOnly { #[default] Refuse, Replace }
#[derive(Clone, Copy, Debug, Default)] #[allow(missing_docs)] pub struct SaveOptions { pub durable: Durability, pub replace: Replace, pub read_only: ReadOnly }
#[allow(missing_docs, clippy::missing_errors_doc)]
pub fn save(path: &Path, head: &[u8], payloads: &[Payload<'_>], _o: &SaveOptions, _w: &dyn Watch) -> Result<(), Error> {
    use std::io::Write;
    let go = || -> std::io::Result<()> {
        let temp = path.with_extension("ingot-tmp");
        let mut file = std::io::BufWriter::new(std::fs::File::create(&temp)?);
        file.write_all(head)?;
        for p in payloads { p.lend(0..p.len(), |b| file.write_all(b))?; }
        file.flush()?;
        std::fs::rename(temp, path)
    };
    go().map_err(|source| Error::Write { path: path.to_owned(), step: "writing", nbytes: 0, source })
}
