//! Windows drives in URLs.

/// Return `C:/x` for `/C:/x` and for `/C|/x`, and other paths unchanged.
pub(crate) fn without_root_of_drive(path: &str) -> String {
    match path.as_bytes() {
        [b'/', drive, b':' | b'|', rest @ ..]
            if drive.is_ascii_alphabetic() && rest.first().is_none_or(|&byte| byte == b'/') =>
        {
            format!("{}:{}", char::from(*drive), &path[3..])
        }
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drives_have_no_slash_before_them() {
        for (path, drive) in [
            ("/C:/x", "C:/x"),
            ("/c|/x", "c:/x"),
            ("/C:", "C:"),
            ("/C:x", "/C:x"),
        ] {
            assert_eq!(without_root_of_drive(path), drive);
        }
    }
}
