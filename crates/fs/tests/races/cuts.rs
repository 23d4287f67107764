//! Power cuts beside relocations: each fsync that returned is kept, by the log or by the commit that moved the data.

use ubtrfs_testkit::RecordingDevice;

use super::*;

const PIECE: usize = 8 * SECTOR;
const PIECES: usize = 4;
const NR_FILES: usize = 2;

/// A write of version `version` to a piece of a file.
type Written = (usize, u64);

#[test]
fn fsyncs_beside_relocations_survive_power_cuts() {
    let seed = Rng::seed_or(1);
    println!("UBTRFS_SEED={seed}");
    #[cfg(debug_assertions)]
    ubtrfs_transaction::delay_races(Duration::from_millis(10));
    let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
    for options in ["compress=zstd", "defaults", "nodatacow"] {
        let device = Arc::new(RecordingDevice::new(Medium::formatted(1 << 30, &mkfs).unwrap()));
        let open = |device: Arc<dyn Device>| Fs::open(vec![device], MountOptions::parse(options).unwrap()).unwrap();
        let fs = open(Arc::clone(&device) as Arc<dyn Device>);
        let new = |nr: usize| fs.create(TOP, nr.to_string().as_bytes(), NewInode::file(0o600), &Caller::ROOT);
        let ids: Vec<InodeId> = (0..NR_FILES).map(|nr| new(nr).unwrap().id).collect();
        fs.sync().unwrap();
        let stop = AtomicBool::new(false);
        let written: Vec<Vec<Written>> = std::thread::scope(|scope| {
            let writers: Vec<_> = ids
                .iter()
                .enumerate()
                .map(|(lane, &id)| {
                    let (fs, device, stop) = (&fs, &device, &stop);
                    let mut rng = Rng::new(seed * 100 + lane as u64);
                    scope.spawn(move || {
                        let mut written = Vec::new();
                        while !stop.load(Ordering::Acquire) {
                            let (piece, version) = (rng.index(PIECES), written.len() as u64 + 1);
                            fs.write(id, (piece * PIECE) as u64, &version.to_le_bytes().repeat(PIECE / 8)).unwrap();
                            written.push((piece, version));
                            if rng.one_in(2) {
                                fs.fsync(id, false).unwrap();
                                device.mark_lane(lane, version);
                            }
                        }
                        written
                    })
                })
                .collect();
            let began = Instant::now();
            let stopping = Stopping(&stop);
            let mut nr_emptied = 0;
            while began.elapsed() < Duration::from_millis(700) {
                for group in fs.block_groups().iter().filter(|group| group.flags.contains(BlockGroupFlags::DATA)) {
                    nr_emptied += u64::from(fs.relocate_block_group(group.start, &Job::new()).is_ok());
                }
            }
            assert!(nr_emptied > 0, "no block group was emptied");
            drop(stopping);
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        let events = device.events();
        let mut rng = Rng::new(seed);
        let mut points: Vec<usize> = (0..12).map(|_| rng.index(events + 1)).collect();
        points.sort_unstable();
        let mut cuts = device.cuts();
        for point in points {
            let (medium, outcome) = cuts.cut(point, &mut rng);
            let Some(promised) = outcome.promised_by[..NR_FILES].iter().copied().collect::<Option<Vec<u64>>>() else {
                continue;
            };
            check_medium(&medium).unwrap();
            let after = Arc::new(MediumDevice::new(medium));
            let fs = open(Arc::clone(&after) as Arc<dyn Device>);
            for ((&id, promised), written) in ids.iter().zip(promised).zip(&written) {
                for piece in 0..PIECES {
                    let versions = || written.iter().filter(|(at, _)| *at == piece).map(|(_, version)| *version);
                    let least = versions().filter(|version| *version <= promised).max().unwrap_or(0);
                    let mut found = fs.read(id, (piece * PIECE) as u64, PIECE).unwrap();
                    found.resize(PIECE, 0);
                    for number in found.as_chunks().0 {
                        let version = u64::from_le_bytes(*number);
                        let is_known = version == 0 || versions().any(|known| known == version);
                        assert!(is_known && version >= least, "{options}: {version} instead of {least} at {point}");
                    }
                }
            }
            fs.close().unwrap();
            check_medium(&after.content()).unwrap();
        }
        fs.close().unwrap();
    }
}
