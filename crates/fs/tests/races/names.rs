//! Names: renames, exchanges, links, files without names and deletions, beside relocations of metadata, snapshots, fsyncs
//! and deletions of subvolumes.

use std::collections::BTreeMap;
use std::sync::RwLock;

use ubtrfs_fs::RenameFlags;

use super::*;

/// A directory with files, and what they must be.
struct Dir {
    subs: [InodeId; 2],
    /// For each name in one of the two subdirectories, the number that the file holds.
    names: BTreeMap<(usize, u64), u64>,
}

const NR_NAMES: u64 = 12;

fn name_of(number: u64) -> Vec<u8> {
    format!("name-{number}-{}", "x".repeat((number % 5) as usize * 20)).into_bytes()
}

fn content_of(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(match number % 3 {
        0 => 10,
        1 => 512,
        _ => 1700,
    })
}

impl Dir {
    fn new(bed: &Bed, name: &str) -> Self {
        let make =
            |dir, name: &str| bed.fs.create(dir, name.as_bytes(), NewInode::dir(0o700), &Caller::ROOT).unwrap().id;
        let id = make(bed.work, name);
        Self { subs: [make(id, "a"), make(id, "b")], names: BTreeMap::new() }
    }

    fn change(&mut self, fs: &Fs, rng: &mut Rng, next: &mut u64) {
        let (dir, number) = (rng.index(2), rng.below(NR_NAMES));
        let (to_dir, to_number) = (rng.index(2), rng.below(NR_NAMES));
        let (from, to) = ((dir, number), (to_dir, to_number));
        let (name, to_name) = (name_of(number), name_of(to_number));
        let has = |names: &BTreeMap<(usize, u64), u64>, at| names.contains_key(&at);
        match rng.below(10) {
            0..3 if !has(&self.names, from) => {
                *next += 1;
                let id = fs.create(self.subs[dir], &name, NewInode::file(0o600), &Caller::ROOT).unwrap().id;
                fs.write(id, 0, &content_of(*next)).unwrap();
                self.names.insert(from, *next);
            }
            3 if !has(&self.names, from) => {
                *next += 1;
                let id = fs.tmpfile(self.subs[dir], 0o600, &Caller::ROOT).unwrap().id;
                fs.open_inode(id).unwrap();
                fs.write(id, 0, &content_of(*next)).unwrap();
                if rng.one_in(3) {
                    fs.fsync(id, false).unwrap();
                }
                if rng.one_in(2) {
                    fs.link(id, self.subs[dir], &name).unwrap();
                    self.names.insert(from, *next);
                }
                fs.release_inode(id);
            }
            4 if has(&self.names, from) && !has(&self.names, to) => {
                let id = fs.lookup(self.subs[dir], &name).unwrap().id;
                fs.link(id, self.subs[to_dir], &to_name).unwrap();
                self.names.insert(to, self.names[&from]);
            }
            5 if has(&self.names, from) => {
                let id = fs.lookup(self.subs[dir], &name).unwrap().id;
                let is_open = rng.one_in(2);
                if is_open {
                    fs.open_inode(id).unwrap();
                }
                fs.unlink(self.subs[dir], &name).unwrap();
                let number = self.names.remove(&from).unwrap();
                if is_open {
                    assert_eq!(fs.read(id, 0, 1 << 20).unwrap(), content_of(number), "an open file without that name");
                    fs.release_inode(id);
                }
            }
            6 if has(&self.names, from) && has(&self.names, to) => {
                fs.rename(self.subs[dir], &name, self.subs[to_dir], &to_name, RenameFlags::EXCHANGE).unwrap();
                let (one, other) = (self.names[&from], self.names[&to]);
                self.names.insert(from, other);
                self.names.insert(to, one);
            }
            7 if has(&self.names, from) => {
                let id = fs.lookup(self.subs[dir], &name).unwrap().id;
                fs.fsync(id, false).unwrap();
            }
            8 if has(&self.names, from) && from != to => {
                fs.rename(self.subs[dir], &name, self.subs[to_dir], &to_name, RenameFlags::WHITEOUT).unwrap();
                let is_same = self.names.get(&to) == self.names.get(&from);
                if !is_same {
                    let number = self.names.remove(&from).unwrap();
                    self.names.insert(to, number);
                    fs.unlink(self.subs[dir], &name).unwrap();
                }
            }
            _ if has(&self.names, from) && from != to => {
                fs.rename(self.subs[dir], &name, self.subs[to_dir], &to_name, RenameFlags::empty()).unwrap();
                if self.names.get(&to) != self.names.get(&from) {
                    let number = self.names.remove(&from).unwrap();
                    self.names.insert(to, number);
                }
            }
            _ => {}
        }
    }

    fn check(&self, fs: &Fs, root: RootId, what: &str) {
        for (sub, id) in self.subs.iter().enumerate() {
            let mut found = Vec::new();
            fs.readdir(InodeId { root, ..*id }, 0, &mut |entry| {
                found.push(entry.name.to_vec());
                true
            })
            .unwrap();
            found.retain(|name| name.starts_with(b"name"));
            found.sort();
            let mut expected: Vec<Vec<u8>> =
                self.names.keys().filter(|(dir, _)| *dir == sub).map(|(_, number)| name_of(*number)).collect();
            expected.sort();
            assert_eq!(found.len(), expected.len(), "{what}: names of {id:?} in {root}");
            assert!(found == expected, "{what}: names of {id:?} in {root}");
        }
        for ((dir, number), content) in &self.names {
            let id = fs.lookup(InodeId { root, ..self.subs[*dir] }, &name_of(*number)).unwrap().id;
            assert!(fs.read(id, 0, 1 << 20).unwrap() == content_of(*content), "{what}: {id:?} in {root}");
        }
    }
}

#[test]
fn names_beside_relocations_and_snapshots_lead_to_their_files() {
    for options in ["defaults", "compress-force=lzo,max_inline=0,discard=sync"] {
        let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
        let bed = Bed::new(Duration::from_millis(3), &mkfs, options);
        let dirs: Vec<RwLock<Dir>> = (0..3).map(|nr| RwLock::new(Dir::new(&bed, &format!("dir-{nr}")))).collect();
        bed_checked(bed, |bed| {
            std::thread::scope(|scope| {
                for (nr, dir) in dirs.iter().enumerate() {
                    let mut rng = bed.rng(nr as u64);
                    scope.spawn(move || {
                        let mut next = nr as u64 * 1_000_000;
                        bed.until_stopped(|| {
                            let mut dir = dir.write().unwrap();
                            for _ in 0..6 {
                                dir.change(&bed.fs, &mut rng, &mut next);
                            }
                            dir.check(&bed.fs, bed.work.root, "beside relocations");
                        });
                    });
                }
                bed.spawn_relocations(scope, bed.rng(50));
                let mut number = 0;
                bed.for_time(Duration::from_millis(1500), || {
                    number += 1;
                    let name = format!("snapshot-{number}");
                    {
                        let dirs: Vec<_> = dirs.iter().map(|dir| dir.read().unwrap()).collect();
                        let id = bed.fs.snapshot(bed.work.root, TOP, name.as_bytes(), number % 2 == 0).unwrap();
                        dirs.iter().for_each(|dir| dir.check(&bed.fs, id.root, "a snapshot"));
                    }
                    if number > 3 {
                        let name = format!("snapshot-{}", number - 3);
                        bed.fs.delete_subvolume(TOP, name.as_bytes(), None).unwrap();
                    }
                });
            });
        });
    }
}
