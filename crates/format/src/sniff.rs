//! Recognises files of other formats: users load the wrong file far more often than a broken one.

use core::fmt;

/// The first bytes of a file while a patch is applied to it in place. As a length of a header, they are beyond every limit.
pub const UNFINISHED_PATCH: &[u8] = b"\xffpatch\r\n";

/// A kind of file that is neither safetensors nor bintensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "each variant says itself what it is, and Display says it in words"
)]
pub enum Foreign {
    GitLfsPointer,
    Html,
    Xml,
    IndexJson,
    Json,
    PytorchZip,
    Npz,
    Zip,
    Pickle,
    Gguf,
    Hdf5,
    Npy,
    Gzip,
    Zstd,
    Pdf,
    UnfinishedPatch,
    Zeros,
}

impl Foreign {
    /// Recognises a file by its first bytes. Meant for files that were already rejected: a valid safetensors file may
    /// begin with any bytes, because its first eight are a number.
    #[must_use]
    pub fn of_start(start: &[u8]) -> Option<Foreign> {
        let text = start.trim_ascii_start();
        let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
        let begins = |prefix: &[u8]| start.starts_with(prefix);
        Some(match start {
            _ if begins(b"version https://git-lfs") => Foreign::GitLfsPointer,
            _ if begins(b"PK\x03\x04") && contains(start, b"data.pkl") => Foreign::PytorchZip,
            _ if begins(b"PK\x03\x04") && contains(start, b".npy") => Foreign::Npz,
            _ if begins(b"PK\x03\x04") || begins(b"PK\x05\x06") => Foreign::Zip,
            _ if begins(b"GGUF") => Foreign::Gguf,
            _ if begins(b"\x89HDF\r\n\x1a\n") => Foreign::Hdf5,
            _ if begins(b"\x93NUMPY") => Foreign::Npy,
            _ if begins(b"\x1f\x8b") => Foreign::Gzip,
            _ if begins(b"\x28\xb5\x2f\xfd") => Foreign::Zstd,
            _ if begins(UNFINISHED_PATCH) => Foreign::UnfinishedPatch,
            _ if begins(b"%PDF-") => Foreign::Pdf,
            // Files of both formats begin with a number that is not zero.
            _ if start.len() >= 8 && start.iter().all(|&byte| byte == 0) => Foreign::Zeros,
            // Protocols 2 to 5, as torch.save wrote before it wrote ZIP files and as pickle writes today. No opcode is
            // below `(`; a binary header of 640 bytes has a zero at this position.
            [0x80, 2..=5, b'('..=u8::MAX, ..] => Foreign::Pickle,
            _ if begins_without_case(text, b"<!doctype html") || begins_without_case(text, b"<html") => {
                Foreign::Html
            }
            _ if text.starts_with(b"<?xml") => Foreign::Xml,
            _ if text.starts_with(b"{") && contains(text, b"\"weight_map\"") => Foreign::IndexJson,
            _ if text.starts_with(b"{\"") || text.starts_with(b"{\n") || text.starts_with(b"{\r") => {
                Foreign::Json
            }
            _ => return None,
        })
    }

    /// Describes the file, with advice on how to load it.
    #[must_use]
    pub const fn description(self) -> &'static str {
        match self {
            Foreign::GitLfsPointer => "a Git LFS pointer, not the file it points to — run `git lfs pull`",
            Foreign::Html => {
                "an HTML page, probably an error or login page saved in place of the file — download it again"
            }
            Foreign::Xml => {
                "an XML document, probably a storage server's error saved in place of the file — download it again"
            }
            Foreign::IndexJson => "the index of a sharded checkpoint — open the shards that it names",
            Foreign::Json => "a JSON document without the 8 bytes of a header length before it",
            Foreign::PytorchZip => {
                "a PyTorch checkpoint (ZIP with a pickle) — convert it with `ingot convert` or torch.load"
            }
            Foreign::Npz => {
                "a NumPy .npz archive — convert it with `ingot convert` or read it with numpy.load"
            }
            Foreign::Zip => {
                "a ZIP archive — unpack it, or if it is a checkpoint, convert it with `ingot convert`"
            }
            Foreign::Pickle => {
                "a Python pickle, perhaps an old PyTorch checkpoint — convert it with `ingot convert` or torch.load"
            }
            Foreign::Gguf => "a GGUF model — convert it with `ingot convert`",
            Foreign::Hdf5 => "an HDF5 file — convert it with `ingot convert`",
            Foreign::Npy => "a NumPy .npy array — convert it with `ingot convert` or read it with numpy.load",
            Foreign::Gzip => "compressed with gzip — unpack it first",
            Foreign::Zstd => "compressed with Zstandard — unpack it first",
            Foreign::Pdf => "a PDF document",
            Foreign::UnfinishedPatch => {
                "a file whose patch in place was not finished — finish it by `ingot delta apply --in-place` with the same patch"
            }
            Foreign::Zeros => {
                "only zeros at the start, as an interrupted copy or a full disk leaves it — fetch it again"
            }
        }
    }
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.description())
    }
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

fn begins_without_case(text: &[u8], lower: &[u8]) -> bool {
    text.get(..lower.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(lower))
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn a_file_is_recognised_by_how_it_begins() {
        for (start, kind) in [
            (
                &b"version https://git-lfs.github.com/spec/v1\n"[..],
                Some(Foreign::GitLfsPointer),
            ),
            (b"PK\x03\x04..archive/data.pkl..", Some(Foreign::PytorchZip)),
            (b"PK\x03\x04..weight.npy..", Some(Foreign::Npz)),
            (b"PK\x03\x04..readme.txt..", Some(Foreign::Zip)),
            (b"PK\x05\x06", Some(Foreign::Zip)),
            // Not a ZIP file, although it contains the name of a member.
            (b"..archive/data.pkl..", None),
            (b"..weight.npy..", None),
            (b"GGUF\x03", Some(Foreign::Gguf)),
            (b"\x89HDF\r\n\x1a\n", Some(Foreign::Hdf5)),
            (b"\x93NUMPY\x01", Some(Foreign::Npy)),
            (b"\x1f\x8b\x08", Some(Foreign::Gzip)),
            (b"\x28\xb5\x2f\xfd", Some(Foreign::Zstd)),
            (b"%PDF-1.7", Some(Foreign::Pdf)),
            (b"\xffpatch\r\n", Some(Foreign::UnfinishedPatch)),
            (&[0; 8], Some(Foreign::Zeros)),
            (&[0; 7], None),
            (b"\0\0\0\0\0\0\0\x01", None),
            (b"\x80\x02}q", Some(Foreign::Pickle)),
            (b"\x80\x05(", Some(Foreign::Pickle)),
            (b"\x80\x06}q", None),
            (b"\x80\x02\0", None),
            (b"\n <!DocType HTML><p>", Some(Foreign::Html)),
            (b"<HTML>", Some(Foreign::Html)),
            (b"\xef\xbb\xbf<?xml version", Some(Foreign::Xml)),
            (b" {\"weight_map\": {}}", Some(Foreign::IndexJson)),
            (b"[\"weight_map\"]", None),
            (b"{\"a\": 1}", Some(Foreign::Json)),
            (b"{\n}", Some(Foreign::Json)),
            (b"{\r\n}", Some(Foreign::Json)),
            (b"{1}", None),
            (b"", None),
        ] {
            assert_eq!(Foreign::of_start(start), kind, "{}", start.escape_ascii());
        }
        assert_eq!(Foreign::Pdf.to_string(), "a PDF document");
    }
}
