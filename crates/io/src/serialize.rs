//! Tensors of a Rust program to a file.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io;
use std::path::Path;

use ingot_format::{Contents, Format, FormatError, View};

use crate::options::SaveOptions;
use crate::payload::Payload;
use crate::save::save;
use crate::watch::Unwatched;

/// Write a file as `serialize_to_file` of either format does: [`save`] with its defaults. All views return their bytes
/// before the disk is touched, so bytes that are fetched or computed are all in memory at once.
fn to_file<S: AsRef<str>, V: View>(
    data: impl IntoIterator<Item = (S, V)>,
    metadata: Option<&HashMap<String, String>>,
    format: Format,
    path: &Path,
) -> Result<(), FormatError> {
    let pairs: Option<Vec<(&str, &str)>> = metadata.map(|map| {
        map.iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
            .collect()
    });
    let contents = Contents::new(data, pairs.as_deref(), format)?;
    let data: Vec<Cow<'_, [u8]>> = contents.data().collect::<Result<_, FormatError>>()?;
    let payloads: Vec<Payload<'_>> = data.iter().map(|bytes| Payload::from(&**bytes)).collect();
    save(
        path,
        contents.layout(),
        &payloads,
        &SaveOptions::default(),
        &Unwatched,
    )
    // The error has the whole text, including the path.
    .map_err(|fault| {
        io::Error::new(
            fault.system().map_or(io::ErrorKind::Other, io::Error::kind),
            fault,
        )
        .into()
    })
}

/// Defines the module of one format. It has the items of the format's module in [`ingot_format`], `serialize_to_file`
/// with the signature of the safetensors crate, and the items in `more`.
macro_rules! format_module {
    ($format:expr, $name:ident, $extension:literal, $tensors:literal $(, $more:item)*) => {
        #[doc = concat!("All that [`ingot_format::", stringify!($name), "`] has, and files.")]
        pub mod $name {
            use std::collections::HashMap;
            use std::path::Path;

            use ingot_format::FormatError;
            #[doc(no_inline)]
            pub use ingot_format::$name::*;

            $($more)*

            #[doc = concat!("Writes the ", stringify!($name), " file that holds `data` and `metadata` to `path`.")]
            ///
            /// An existing file stays until the new one is complete and on the disk: this is [`crate::save`] with its
            /// defaults.
            ///
            /// ```
            #[doc = concat!("use ingot_io::", stringify!($name), "::{Dtype, ", $tensors, ", TensorView, serialize_to_file};")]
            /// let bias = TensorView::new(Dtype::F32, vec![2], b"12345678")?;
            /// let folder = tempfile::tempdir()?;
            #[doc = concat!("let path = folder.path().join(\"example.", $extension, "\");")]
            /// serialize_to_file([("bias", &bias)], None, &path)?;
            /// let file = std::fs::read(&path)?;
            #[doc = concat!("assert_eq!(", $tensors, "::deserialize(&file)?.tensor(\"bias\")?, bias);")]
            /// # Ok::<(), Box<dyn std::error::Error>>(())
            /// ```
            ///
            /// # Errors
            /// A name twice or reserved, a size that overflows or ends inside a byte, a dtype that the format lacks, a
            /// header that is too large, or bytes that are not as many as shape and dtype need, all before the disk is
            /// touched; [`FormatError::IoError`] with a [`crate::Error`] in it when the system refuses a step.
            #[allow(
                clippy::implicit_hasher,
                reason = "a caller who passes `None` would have to name a hasher"
            )]
            pub fn serialize_to_file<S: AsRef<str>, V: View>(
                data: impl IntoIterator<Item = (S, V)>,
                metadata: Option<HashMap<String, String>>,
                path: &Path,
            ) -> Result<(), FormatError> {
                super::to_file(data, metadata.as_ref(), $format, path)
            }
        }
    };
}

format_module!(
    ingot_format::Format::Safetensors,
    safetensors,
    "safetensors",
    "SafeTensors",
    /// The names of that crate's module `tensor`.
    pub mod tensor {
        #[doc(no_inline)]
        pub use super::serialize_to_file;
        #[doc(no_inline)]
        pub use ingot_format::tensor::*;
    }
);
format_module!(ingot_format::Format::Bintensors, bintensors, "bt", "BinTensors");
