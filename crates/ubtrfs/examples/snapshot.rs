//! Keeps the last three states of a directory as read-only snapshots: `cargo run -p ubtrfs --example snapshot`.

use ubtrfs::{Filesystem, SnapshotAccess};

const KEPT: usize = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let scratch = tempfile::tempdir()?;
    let fs = Filesystem::make_image(scratch.path().join("disk.img"), 512 << 20)?;
    fs.create_subvolume("/data")?;
    fs.create_dir("/snapshots")?;

    for day in 1..=5 {
        fs.write("/data/report", format!("what happened on day {day}\n"))?;
        fs.snapshot("/data", format!("/snapshots/day-{day}"), SnapshotAccess::ReadOnly)?;

        let mut kept: Vec<_> = fs.subvolumes()?.into_iter().filter(|subvolume| subvolume.is_read_only()).collect();
        kept.sort_by_key(|subvolume| std::cmp::Reverse(subvolume.id()));
        for old in kept.iter().skip(KEPT) {
            fs.delete_subvolume(old.path())?;
        }
    }

    for subvolume in fs.subvolumes()?.iter().filter(|subvolume| subvolume.is_read_only()) {
        let report = fs.read(subvolume.path().join("report"))?;
        print!("{}: {}", subvolume.path().display(), String::from_utf8_lossy(&report));
    }
    fs.close()?;
    Ok(())
}
