//! Lists everything in an image: `cargo run -p ubtrfs --example walk -- disk.img`.
//!
//! The image is not trusted: names are printed escaped, and a directory that contains itself ends the walk with an
//! error.

use std::path::{Path, PathBuf};

use ubtrfs::{FileKind, Filesystem, MountOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let fs = match std::env::args_os().nth(1) {
        Some(image) => Filesystem::open_image_with(image, MountOptions { read_only: true, ..MountOptions::default() })?,
        None => sample()?,
    };
    let mut files = 0u64;
    let mut bytes = 0u64;
    let mut waiting = vec![(PathBuf::from("/"), 0)];
    while let Some((dir, depth)) = waiting.pop() {
        if depth > 4096 {
            return Err(format!("{dir:?} lies too deep; the image may hold a cycle of directories").into());
        }
        for entry in fs.read_dir(&dir)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            println!("{:>12} {:?}", metadata.len(), entry.path());
            if entry.kind() == Some(FileKind::Dir) {
                waiting.push((entry.path(), depth + 1));
            }
            files += 1;
            bytes += metadata.len();
        }
    }
    println!("{files} names, {bytes} bytes");
    fs.close()?;
    Ok(())
}

/// A filesystem to list if the arguments name no image.
fn sample() -> ubtrfs::Result<Filesystem> {
    let fs = Filesystem::make_in_memory(256 << 20)?;
    fs.create_dir_all("/usr/share/doc")?;
    fs.write(Path::new("/usr/share/doc/README"), "read me")?;
    Ok(fs)
}
