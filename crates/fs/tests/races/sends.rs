//! Sends and receives beside writers, snapshots, deletions and relocations.

use std::io::{self, Write};

use ubtrfs_fs::{Error, ReceiveOptions, SendRequest};

use super::*;

/// An output that takes its time, as a pipe does.
#[derive(Default)]
struct Slow(Vec<u8>);

impl Write for Slow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        std::thread::sleep(Duration::from_nanos(bytes.len() as u64 * 60));
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn request(id: RootId, parent: Option<RootId>) -> SendRequest {
    SendRequest {
        subvolumes: vec![id],
        parent,
        clone_sources: Vec::new(),
        version: 2,
        compressed_data: true,
        no_data: false,
        joined: false,
    }
}

/// Files that were opened for writing before a subvolume became read-only still change it. A send beside such changes
/// fails, or sends what the subvolume held.
#[test]
fn a_send_beside_writes_through_open_files_sends_no_other_data() {
    const NR_FILES: usize = 96;
    const LEN: usize = 64 * SECTOR;
    let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
    let bed = Bed::new(Duration::from_millis(1), &mkfs, "nodatasum");
    let files: Vec<InodeId> = (0..NR_FILES).map(|nr| bed.create(&nr.to_string())).collect();
    for &id in &files {
        for at in 0..LEN / SECTOR {
            bed.fs.write(id, (at * SECTOR) as u64, &[1; SECTOR]).unwrap();
        }
        bed.fs.flush_data().unwrap();
        bed.fs.open_inode(id).unwrap();
    }
    let other = bed.fs.create(TOP, b"other", NewInode::file(0o600), &Caller::ROOT).unwrap().id;
    bed.fs.set_subvolume_read_only(bed.work.root, true).unwrap();
    bed_checked(bed, |bed| {
        let (mut nr_sent, mut nr_failed) = (0, 0);
        std::thread::scope(|scope| {
            let (mut rng, files) = (bed.rng(1), &files);
            scope.spawn(move || {
                bed.until_stopped(|| {
                    for _ in 0..64 {
                        let at = (rng.index(LEN / SECTOR) * SECTOR) as u64;
                        bed.fs.write_opened(*rng.pick(files), at, &[1; SECTOR], false).unwrap();
                    }
                    bed.fs.sync().unwrap();
                    for nr in 0..64 {
                        bed.fs.write(other, ((rng.index(64) * 64 + nr) * SECTOR) as u64, &[0xee; SECTOR]).unwrap();
                    }
                    bed.fs.sync().unwrap();
                });
            });
            bed.for_time(Duration::from_secs(2), || {
                let mut output = Slow::default();
                match bed.fs.send(&request(bed.work.root, None), &mut output, &Job::new()) {
                    Ok(()) => {
                        nr_sent += 1;
                        assert!(!output.0.windows(64).any(|part| part == [0xee; 64]), "it sent data of another file");
                    }
                    Err(Error::Busy(_)) => nr_failed += 1,
                    Err(error) => panic!("{error}"),
                }
            });
        });
        assert!(nr_sent + nr_failed > 0, "no send ended");
    });
}

/// A snapshot of a subvolume with unlinked files that are open loses these files soon after it was made.
#[test]
fn a_send_that_begins_with_a_snapshot_sees_no_unlinked_files_vanish() {
    let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
    let bed = Bed::new(Duration::from_millis(10), &mkfs, "defaults");
    for nr in 0..200 {
        let id = bed.create(&nr.to_string());
        bed.fs.write(id, 0, &[nr as u8; 3 * SECTOR]).unwrap();
        if nr % 2 == 0 {
            bed.fs.open_inode(id).unwrap();
            bed.fs.unlink(bed.work, nr.to_string().as_bytes()).unwrap();
        }
    }
    bed.fs.sync().unwrap();
    let touched = bed.fs.create(TOP, b"touched", NewInode::file(0o600), &Caller::ROOT).unwrap().id;
    bed_checked(bed, |bed| {
        let last = std::sync::atomic::AtomicU64::new(0);
        let mut first = None;
        std::thread::scope(|scope| {
            let last = &last;
            scope.spawn(move || {
                let mut number = 0;
                bed.until_stopped(|| {
                    number += 1;
                    let name = format!("snapshot-{number:05}");
                    last.store(number, Ordering::Release);
                    bed.fs.snapshot(bed.work.root, TOP, name.as_bytes(), true).unwrap();
                    std::thread::sleep(Duration::from_millis(30));
                });
            });
            scope.spawn(move || {
                bed.until_stopped(|| {
                    bed.fs.write(touched, 0, &[1; 100]).unwrap();
                    bed.fs.sync().unwrap();
                });
            });
            let (mut nr_sent, mut seen) = (0, None);
            bed.for_time(Duration::from_secs(2), || {
                let name = format!("snapshot-{:05}", last.load(Ordering::Acquire));
                let Ok(found) = bed.fs.lookup(TOP, name.as_bytes()) else { return };
                if seen.replace(name.clone()) == Some(name) {
                    return;
                }
                let mut output = Slow::default();
                bed.fs.send(&request(found.id.root, None), &mut output, &Job::new()).unwrap();
                nr_sent += 1;
                let len = *first.get_or_insert(output.0.len());
                assert_eq!(output.0.len(), len, "send {nr_sent}");
            });
            assert!(nr_sent > 0);
        });
    });
}

/// Snapshots are sent, received, compared and deleted beside writers and relocations.
#[test]
fn streams_beside_relocations_hold_the_content_of_their_snapshots() {
    const SECTORS: usize = 64;
    for (options, shares) in [("compress=zstd", true), ("nodatacow", true), ("discard=sync", false)] {
        let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
        let bed = Bed::new(Duration::from_millis(4), &mkfs, options);
        let mut files: Vec<Checked> = (0..3).map(|nr| Checked::new(&bed, &nr.to_string(), SECTORS * SECTOR)).collect();
        bed_checked(bed, |bed| {
            std::thread::scope(|scope| {
                bed.spawn_writers(scope, &mut files, "beside sends", |file, rng| {
                    let at = rng.index(SECTORS - 8) * SECTOR;
                    let len = (1 + rng.index(8)) * SECTOR;
                    match rng.below(4) {
                        0 => {
                            let mode = FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE;
                            bed.fs.fallocate(file.id, at as u64, len as u64, mode).unwrap();
                            file.content[at..at + len].fill(0);
                        }
                        1 => file.write(&bed.fs, at, &vec![rng.below(256) as u8; len]),
                        _ => file.write(&bed.fs, at, &rng.bytes(len)),
                    }
                });
                bed.spawn_relocations(scope, bed.rng(60));
                let mut rng = bed.rng(61);
                let mut before: Option<(Vec<u8>, RootId)> = None;
                let mut number = 0;
                bed.for_time(Duration::from_millis(1500), || {
                    number += 1;
                    let (name, dir_name) = (format!("s{number}").into_bytes(), format!("d{number}").into_bytes());
                    let snapshot = bed.fs.snapshot(bed.work.root, TOP, &name, true).unwrap();
                    let dir = bed.fs.create(TOP, &dir_name, NewInode::dir(0o700), &Caller::ROOT).unwrap().id;
                    let parent = before.as_ref().map(|(_, id)| *id).filter(|_| rng.one_in(2));
                    let mut stream = Vec::new();
                    bed.fs.send(&request(snapshot.root, parent), &mut stream, &Job::new()).unwrap();
                    let receive = ReceiveOptions { verify: rng.one_in(2), shares, ..ReceiveOptions::default() };
                    let report = bed.fs.receive(dir, stream.as_slice(), &receive, &Job::new(), &mut |_| ()).unwrap();
                    let received = report.subvolumes[0].id;
                    for nr in 0..3 {
                        let of = |root| {
                            let top = InodeId { root, ino: Ino::ROOT_DIR };
                            let id = bed.fs.lookup(top, nr.to_string().as_bytes()).unwrap().id;
                            bed.fs.read(id, 0, SECTORS * SECTOR).unwrap()
                        };
                        assert!(of(snapshot.root) == of(received), "file {nr} of snapshot {number}");
                    }
                    bed.fs.delete_subvolume(dir, &report.subvolumes[0].path, None).unwrap();
                    if let Some((name, _)) = before.replace((name, snapshot.root)) {
                        bed.fs.delete_subvolume(TOP, &name, None).unwrap();
                    }
                });
            });
            for file in &files {
                file.check(&bed.fs, "at the end");
            }
        });
    }
}
