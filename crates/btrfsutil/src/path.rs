//! How a path splits into a directory and a name.

/// Splits the path of a new or a deleted subvolume. Slashes at the end are ignored.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |at| at + 1);
    let (stem, is_absolute) = (&path[..end], path.first() == Some(&b'/'));
    match stem.iter().rposition(|byte| *byte == b'/') {
        Some(0) => (b"/", &stem[1..]),
        Some(slash) => (&stem[..slash], &stem[slash + 1..]),
        None if is_absolute => (b"/", b""),
        None => (b".", stem),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_split_at_its_last_slash() {
        for (path, dir, name) in [
            ("a", ".", "a"),
            ("a/", ".", "a"),
            ("a/b//", "a", "b"),
            ("a//b", "a/", "b"),
            ("/a", "/", "a"),
            ("/", "/", ""),
            ("//", "/", ""),
            ("", ".", ""),
            ("a/.", "a", "."),
        ] {
            assert_eq!(split(path.as_bytes()), (dir.as_bytes(), name.as_bytes()), "{path}");
        }
    }
}
