//! Lets Linux make the images from which fuzzing starts, and saves them in `corpus/images`. Needs root and loop
//! devices.
//!
//! `cargo run -p ubtrfs-testkit --example keep_images -- crates/testkit/corpus/images`

use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ubtrfs_testkit::hostile::SeedImage;
use ubtrfs_testkit::{Image, LoopMount, Rng, run};

fn main() -> Result<()> {
    let dir = PathBuf::from(std::env::args().nth(1).context("where to?")?);
    for (name, mkfs, options) in [
        ("small-nodes", &["-m", "single", "-n", "4096"][..], "compress=lzo"),
        ("default", &["-m", "single"], "compress=zstd"),
        ("mixed", &["-M", "-n", "4096", "-m", "single", "-d", "single", "--csum", "xxhash"], "compress=zlib"),
        ("log", &["-m", "single", "-n", "4096"], "commit=300"),
    ] {
        let image = Image::kernel_made(256 << 20, mkfs)?;
        let mount = LoopMount::new(image.path(), options)?;
        fill(mount.path(), 40)?;
        run("sync", ["-f".as_ref(), mount.path().as_os_str()])?;
        let path = dir.join(format!("{name}.img.zst"));
        if name == "log" {
            // Copy the image while it is mounted, because an unmount would commit the fsynced changes and drop the log.
            logged(mount.path())?;
            let taken = Image::copy_of(image.path())?;
            mount.close()?;
            SeedImage::keep(&taken, &path)?;
        } else {
            mount.close()?;
            SeedImage::keep(&image, &path)?;
        }
        println!("{}: {} bytes", path.display(), std::fs::metadata(&path)?.len());
    }
    Ok(())
}

/// Fills a filesystem with a few files of each kind.
fn fill(root: &Path, files: usize) -> Result<()> {
    let mut rng = Rng::new(5);
    for index in 0..files {
        let dir = root.join(format!("dir-{}", index % 4));
        std::fs::create_dir_all(&dir)?;
        let len = rng.len(3000) as usize;
        let file = dir.join(format!("file-{index}"));
        std::fs::write(&file, rng.text(len))?;
        if index % 5 == 0 {
            std::fs::hard_link(&file, root.join(format!("link-{index}")))?;
            symlink("somewhere", dir.join(format!("symlink-{index}")))?;
        }
        if index % 7 == 0 {
            let value = rng.bytes(50);
            rustix::fs::setxattr(&file, "user.name", &value, rustix::fs::XattrFlags::empty())?;
        }
    }
    let big = std::fs::File::create(root.join("compressed"))?;
    big.write_all_at(&b"all the same ".repeat(12_000), 0)?;
    big.write_all_at(b"behind a hole", 900_000)?;
    let plain = std::fs::File::create(root.join("plain"))?;
    plain.write_all_at(&rng.bytes(9000), 0)?;
    rustix::fs::fallocate(&plain, rustix::fs::FallocateFlags::KEEP_SIZE, 12_288, 65_536)?;
    run("cp", ["--reflink=always".as_ref(), root.join("compressed").as_os_str(), root.join("reflink").as_os_str()])?;
    let sub = root.join("subvolume");
    run("btrfs", ["subvolume".as_ref(), "create".as_ref(), sub.as_os_str()])?;
    std::fs::write(sub.join("inside"), b"subvolume")?;
    run(
        "btrfs",
        ["subvolume", "snapshot", "-r"]
            .iter()
            .map(std::ffi::OsStr::new)
            .chain([sub.as_os_str(), root.join("snapshot").as_os_str()]),
    )?;
    run("sync", ["-f".as_ref(), root.as_os_str()])?;
    std::fs::write(sub.join("later"), b"not in the snapshot")?;
    Ok(())
}

fn logged(root: &Path) -> Result<()> {
    let sync = |path: &str| -> Result<()> { Ok(std::fs::File::open(root.join(path))?.sync_all()?) };
    for index in 0..12 {
        std::fs::write(root.join(format!("logged-{index}")), vec![index; 500 * usize::from(index)])?;
        sync(&format!("logged-{index}"))?;
    }
    std::fs::hard_link(root.join("logged-3"), root.join("dir-1/logged-link"))?;
    std::fs::remove_file(root.join("logged-4"))?;
    rustix::fs::setxattr(root.join("logged-5"), "user.logged", b"value", rustix::fs::XattrFlags::empty())?;
    sync("logged-3")?;
    sync("logged-5")?;
    sync("dir-1")?;
    let plain = std::fs::File::options().write(true).open(root.join("plain"))?;
    plain.write_all_at(b"logged", 5000)?;
    plain.sync_all()?;
    Ok(())
}
