//! Tests power cuts while files are mapped shared: pages that msync reported as written are on disk afterwards; other
//! pages have old or new content.
//!
//! Method: this process serves a mount over a device that records every write. A program in another process writes
//! files through shared mappings and syncs some of them; after each sync it waits until the recording notes the sync.
//! Then the power is cut after every event of the recording. Each page of a file holds one version number, which names
//! the round that wrote it.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use tempfile::TempDir;
use ubtrfs_device::Device;
use ubtrfs_fs::{Fs, MountOptions};
use ubtrfs_fuse::{MountConfig, Session};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{FsTarget, Medium, MediumDevice, RecordingDevice, Rng, Target, capability, check_medium};

const PAGE: usize = 4096;
const PAGES: usize = 48;
const ROUNDS: u64 = 6;
/// The number of cuts after each event. Each cut keeps, drops and tears different writes.
const CUTS: usize = 4;

/// Round 1 writes and fsyncs three files. Each later round changes all their pages through mappings, and syncs the
/// first file, the first half of the second file, and nothing of the third.
const WRITER: &str = r"
import mmap, os, sys
page, pages, rounds = map(int, sys.argv[1:4])
def done(round):
    print(round, flush=True)
    sys.stdin.readline()
maps = []
for name in ('synced', 'half', 'unsynced'):
    fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
    os.write(fd, bytes([1]) * (page * pages))
    os.fsync(fd)
    maps.append(mmap.mmap(fd, page * pages, mmap.MAP_SHARED))
done(1)
for round in range(2, rounds + 1):
    for map in maps:
        for at in range(pages):
            map[at * page:(at + 1) * page] = bytes([round]) * page
    maps[0].flush()
    maps[1].flush(0, page * pages // 2)
    done(round)
";

#[test]
fn data_synced_through_a_mapping_survives_a_power_cut() {
    if !capability::fuse() || !capability::program("python3") {
        return;
    }
    let base = Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap();
    let device = Arc::new(RecordingDevice::new(base));
    let options = MountOptions { track_lookups: true, ..MountOptions::parse("commit=300").unwrap() };
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], options).unwrap();
    let dir = TempDir::with_prefix("ubtrfs-mapped-").unwrap();
    let session = Session::mount(fs, dir.path(), &MountConfig::default()).unwrap();
    let server = std::thread::spawn(move || session.run());
    write_and_mark(dir.path(), &device);
    ubtrfs_fuse::unmount(dir.path(), false).unwrap();
    server.join().unwrap().unwrap();
    device.mark(ROUNDS + 1);

    let mut builder = device.cuts();
    let mut rng = Rng::new(Rng::seed_or(1));
    let mut seen = [0; 3];
    for point in (0..=device.events()).flat_map(|point| [point; CUTS]) {
        let (medium, outcome) = builder.cut(point, &mut rng);
        let Some(promised) = outcome.promised else { continue };
        let found = versions(&medium).unwrap_or_else(|error| panic!("cut at event {point}, {outcome:?}: {error:#}"));
        // After the unmount every write is durable, so no page is old.
        let is_over = promised > ROUNDS;
        let newest = (promised + 1).min(ROUNDS);
        let synced = promised.min(ROUNDS);
        for (file, pages) in found.iter().enumerate() {
            for (at, version) in pages.iter().enumerate() {
                let is_synced = is_over || file == 0 || (file == 1 && at < PAGES / 2);
                let oldest = if is_synced { synced } else { 1 };
                assert!(
                    (oldest..=newest).contains(version),
                    "file {file}, page {at}: version {version}, and it was synced in {synced}; cut at event {point}"
                );
                seen[file] |= 1 << version;
            }
        }
    }
    println!("{} events, versions seen {seen:x?}", device.events());
    // In the first file, the version of every round was found after some cut.
    assert_eq!(seen[0], (1 << (ROUNDS + 1)) - 2);
}

/// Runs the writer, and marks each of its rounds in the recording as a promise.
fn write_and_mark(dir: &Path, device: &RecordingDevice) {
    let numbers = [PAGE.to_string(), PAGES.to_string(), ROUNDS.to_string()];
    let mut child = Command::new("python3")
        .args(["-c", WRITER])
        .args(numbers)
        .current_dir(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut go_on = child.stdin.take().unwrap();
    let mut rounds = 0;
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        rounds = line.unwrap().parse().unwrap();
        device.mark(rounds);
        go_on.write_all(b"\n").unwrap();
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(rounds, ROUNDS);
}

/// Returns the version of each page of the three files.
fn versions(medium: &Medium) -> anyhow::Result<[Vec<u64>; 3]> {
    check_medium(medium)?;
    let device: Arc<dyn Device> = Arc::new(MediumDevice::new(medium.clone()));
    let mut target = FsTarget::on_device(device, MountOptions::default())?;
    let mut found = [Vec::new(), Vec::new(), Vec::new()];
    for (name, versions) in ["synced", "half", "unsynced"].iter().zip(&mut found) {
        let content = target.read(name.as_bytes(), 0, PAGE * PAGES + 1);
        let content = content.map_err(|errno| anyhow::anyhow!("{name}: errno {errno}"))?;
        anyhow::ensure!(content.len() == PAGE * PAGES, "{name} has {} bytes", content.len());
        for page in content.chunks(PAGE) {
            anyhow::ensure!(page.iter().all(|byte| *byte == page[0]), "{name} has a page of two versions");
            versions.push(page[0].into());
        }
    }
    target.close()?;
    Ok(found)
}
