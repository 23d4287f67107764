//! Makes an image, without root or loop devices: `cargo run -p ubtrfs --example make_image -- disk.img`.
//!
//! The image has a subvolume for the system, files of several owners, and compressed data. Linux mounts the image with
//! `mount -o loop,subvol=root disk.img /mnt`.

use std::path::PathBuf;
use std::time::SystemTime;

use ubtrfs::{FileTimes, Filesystem, MkfsOptions, MountOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let scratch = tempfile::tempdir()?;
    let image = std::env::args_os().nth(1).map_or_else(|| scratch.path().join("disk.img"), PathBuf::from);

    let device = ubtrfs::FileDevice::create(&image, 512 << 20, true)?;
    Filesystem::make_on(&device, &MkfsOptions { label: b"system".to_vec(), ..MkfsOptions::default() })?;
    drop(device);

    let fs = Filesystem::open_image_with(&image, MountOptions::parse("compress=zstd:3")?)?;
    fs.create_subvolume("/root")?;
    fs.create_dir_all("/root/etc")?;
    fs.write("/root/etc/hostname", "builder\n")?;
    fs.create_dir_all("/root/home/alice")?;
    fs.set_owner("/root/home/alice", 1000, 1000)?;
    fs.set_permissions("/root/home/alice", 0o700)?;
    fs.write("/root/home/alice/notes", "one line that compresses well\n".repeat(10_000))?;
    fs.set_owner("/root/home/alice/notes", 1000, 1000)?;
    // Set fixed times, as reproducible builds do.
    let times = FileTimes::new().set_accessed(SystemTime::UNIX_EPOCH).set_modified(SystemTime::UNIX_EPOCH);
    fs.set_times("/root/home/alice/notes", times)?;
    fs.symlink("etc/hostname", "/root/name")?;

    let usage = fs.usage()?;
    fs.close()?;
    println!("{}: {} of {} bytes are free", image.display(), usage.free_bytes, usage.total_bytes);
    Ok(())
}
