//! Makes a synthetic archive that resembles a source tree. The number of files and the seed determine the bytes of the
//! archive.
//!
//! | what | share |
//! |---|---|
//! | directories | one for 15 files, at most 6 levels below the directory `tree` |
//! | files | text of 100 to 400,000 bytes, with a median near 5,000 bytes |
//! | symbolic links | 1 of 200 |
//! | hard links | 1 of 500 |

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result};
use tar::{Builder, EntryType, Header};

use crate::rng::Rng;

/// Writes an archive of `files` members that are not directories.
pub(crate) fn write(path: &Path, files: u64, seed: u64) -> Result<()> {
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    let mut builder = Builder::new(BufWriter::with_capacity(1 << 20, file));
    let mut rng = Rng::new(seed);
    let text = text(&mut rng);
    let mut dirs = vec!["tree".to_owned()];
    append(&mut builder, header(EntryType::Directory, 0o755, 0), "tree", &[])?;
    let mut last_file: Option<String> = None;
    for index in 0..files {
        if index % FILES_A_DIR == FILES_A_DIR - 1 {
            let parent = &dirs[rng.below(dirs.len() as u64) as usize];
            let parent = if parent.matches('/').count() < DEEPEST { parent } else { &dirs[0] };
            let dir = format!("{parent}/dir-{:05}", dirs.len());
            append(&mut builder, header(EntryType::Directory, 0o755, 0), &dir, &[])?;
            dirs.push(dir);
        }
        let dir = dirs.last().context("the first directory is always there")?;
        let name = format!("{dir}/{}_{index:06}.c", WORDS[rng.below(WORDS.len() as u64) as usize]);
        match (&last_file, index % 200, index % 500) {
            (Some(last), 199, _) => append_link(&mut builder, EntryType::Symlink, &name, &base_name(last))?,
            (Some(last), _, 498) => append_link(&mut builder, EntryType::Link, &name, last)?,
            _ => {
                let len = file_len(&mut rng);
                let start = rng.below((text.len() - len) as u64) as usize;
                append(&mut builder, header(EntryType::Regular, 0o644, len), &name, &text[start..start + len])?;
                last_file = Some(name);
            }
        }
    }
    builder.into_inner()?.flush()?;
    Ok(())
}

fn base_name(path: &str) -> String {
    path.rsplit('/').next().unwrap_or(path).to_owned()
}

/// Picks a file size. The distribution is log-uniform in each of four ranges of sizes, so that half of the files are
/// shorter than 5,000 bytes and few are long.
fn file_len(rng: &mut Rng) -> usize {
    let (low, high) = match rng.below(100) {
        0..15 => (100, 1_000),
        15..85 => (1_000, 25_000),
        85..98 => (25_000, 80_000),
        _ => (80_000, 400_000),
    };
    let position = (rng.next() >> 11) as f64 / (1u64 << 53) as f64;
    (f64::from(low) * (f64::from(high) / f64::from(low)).powf(position)) as usize
}

fn text(rng: &mut Rng) -> Vec<u8> {
    let mut text = Vec::with_capacity(TEXT_LEN + 64);
    while text.len() < TEXT_LEN {
        for _ in 0..1 + rng.below(9) {
            text.extend_from_slice(WORDS[rng.below(WORDS.len() as u64) as usize].as_bytes());
            text.push(b" (;,={}\t"[rng.below(8) as usize]);
        }
        text.extend_from_slice(format!("{:x}\n", rng.next()).as_bytes());
    }
    text
}

fn header(kind: EntryType, mode: u32, len: usize) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(MTIME);
    header.set_size(len as u64);
    header
}

fn append(builder: &mut Builder<impl Write>, mut header: Header, path: &str, data: &[u8]) -> Result<()> {
    Ok(builder.append_data(&mut header, path, data)?)
}

fn append_link(builder: &mut Builder<impl Write>, kind: EntryType, path: &str, target: &str) -> Result<()> {
    Ok(builder.append_link(&mut header(kind, 0o777, 0), path, target)?)
}

const FILES_A_DIR: u64 = 15;
const DEEPEST: usize = 6;
const TEXT_LEN: usize = 8 << 20;
const MTIME: u64 = 1_700_000_000;
const WORDS: &[&str] = &[
    "static", "inode", "struct", "return", "lock", "if", "page", "int", "unsigned", "buffer", "extent", "for", "root",
    "list", "node", "size", "error", "void", "const", "u64", "tree", "block", "group", "device", "while", "goto",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_make_equal_archives() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a", "b", "c"].map(|name| dir.path().join(name));
        write(&paths[0], 1000, 5).unwrap();
        write(&paths[1], 1000, 5).unwrap();
        write(&paths[2], 1000, 6).unwrap();
        let bytes = paths.each_ref().map(|path| std::fs::read(path).unwrap());
        assert!(bytes[0] == bytes[1] && bytes[0] != bytes[2]);
        let mut archive = tar::Archive::new(&bytes[0][..]);
        let kinds: Vec<EntryType> =
            archive.entries().unwrap().map(|entry| entry.unwrap().header().entry_type()).collect();
        let count = |kind| kinds.iter().filter(|found| **found == kind).count();
        assert_eq!((count(EntryType::Symlink), count(EntryType::Link)), (5, 2));
        assert_eq!(kinds.len(), 1000 + count(EntryType::Directory));
    }
}
