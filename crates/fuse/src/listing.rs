//! Decides which listings bring attributes.
//!
//! A listing can bring the attributes of each entry (readdirplus). The kernel then makes an inode for each entry, which
//! takes several times as long as the names. `ls -l`, `du` and `tar` use the attributes, and request them for each
//! entry if the listing has none; `find` and shells use only names. The server may leave attributes out, entry by
//! entry. The kernel does not tell whether a program uses the attributes that it got. So the server leaves out the
//! attributes of a few entries: a lookup of such an entry shows that the program uses attributes.
//!
//! ```text
//!           PATIENCE entries without a lookup           a lookup in a directory that the caller listed
//!   New -------------------------------------> Names -----------------------------------------------> Proven
//!    |                                           ^                                                      |
//!    |                                           +--- a directory begins after PATIENCE entries --------+
//!    +------------------------------ a lookup --------- without a lookup ------------------------------>+
//! ```
//!
//! - G1. Entries that are directories always have their attributes, because every program that walks a tree enters
//!   directories.
//! - G2. A caller that uses no attributes may use some later. So its listings have no attributes only as long as
//!   nothing is looked up in the directories that it listed. A program may read a whole directory before it uses the
//!   attributes. So once a caller was seen using attributes, its listings have them to the end of the directory
//!   (`Proven`).
//! - G3. The kernel keeps the names of a listing, and answers the next listing of any program from them, without
//!   attributes. So after some lookups in a directory that was listed without attributes, the kernel is told to forget
//!   the names of this directory, and of other directories that were listed without attributes
//!   ([`Listings::looked_up`]).
//! - G4. The memory is bounded ([`CALLERS_MAX`], [`DIRS_MAX`]). A forgotten entry costs only speed: the kernel looks up
//!   an entry without attributes as any other name.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The callers that listed directories lately, and these directories.
#[derive(Debug, Default)]
pub(crate) struct Listings {
    inner: Mutex<ListingHistory>,
    /// Whether `ListingHistory::dirs` has entries; read without the lock at each lookup.
    has_dirs: AtomicBool,
}

#[derive(Debug, Default)]
struct ListingHistory {
    /// By thread, as the kernel names it in requests.
    callers: HashMap<u32, ListingCaller>,
    /// By node. Directories of which some entries were listed without attributes.
    dirs: HashMap<u64, ListedDir>,
    /// The nodes of `dirs`, and some that were removed from it, in the order in which they were added.
    order: VecDeque<u64>,
}

#[derive(Clone, Copy, Debug)]
struct ListingCaller {
    mode: ListingMode,
    /// Entries with attributes since a lookup has shown that the caller uses them.
    nr_unused: u64,
    /// Entries since the last entry that was left out as a sample.
    nr_since_sample: u64,
    nr_lookups: u64,
    listed_at: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ListingMode {
    New,
    Names,
    Proven,
}

#[derive(Clone, Copy, Debug)]
struct ListedDir {
    caller: u32,
    /// Whether more than samples were left out.
    is_by_name: bool,
    nr_looked_up: u32,
}

/// One answer to a listing request.
#[derive(Debug)]
pub(crate) struct Listing {
    node: u64,
    caller: u32,
    state: ListingCaller,
    /// Whether some entries of this answer were left out.
    has_left_out: bool,
}

impl Listings {
    /// Begins an answer with the entries of the directory `node` from `offset` on.
    pub(crate) fn begin(&self, caller: u32, node: u64, offset: u64) -> Listing {
        let now = Instant::now();
        let known = self.inner.lock().callers.get(&caller).copied();
        let mut state = known.filter(|known| now.duration_since(known.listed_at) < MEMORY).unwrap_or(ListingCaller {
            mode: ListingMode::New,
            nr_unused: 0,
            nr_since_sample: 0,
            nr_lookups: 0,
            listed_at: now,
        });
        state.listed_at = now;
        // G2: a proven caller is judged only between two directories.
        if state.nr_unused >= PATIENCE && (state.mode == ListingMode::New || offset == 0) {
            state.mode = ListingMode::Names;
        }
        Listing { node, caller, state, has_left_out: false }
    }

    /// Ends an answer.
    pub(crate) fn end(&self, listing: &Listing) {
        let mut inner = self.inner.lock();
        inner.remember_caller(listing);
        if listing.has_left_out {
            inner.remember_dir(listing);
            self.has_dirs.store(true, Ordering::Relaxed);
        }
    }

    /// Notes a lookup of a name in the directory `node`. The name belongs to a file that is not a directory. Returns
    /// the directories whose names the kernel has to forget (G3).
    pub(crate) fn looked_up(&self, node: u64) -> Vec<u64> {
        match self.has_dirs.load(Ordering::Relaxed) {
            true => self.note_lookup(node),
            false => Vec::new(),
        }
    }

    fn note_lookup(&self, node: u64) -> Vec<u64> {
        let mut inner = self.inner.lock();
        let Some(dir) = inner.dirs.get_mut(&node) else { return Vec::new() };
        dir.nr_looked_up += 1;
        let (caller, forgets) = (dir.caller, dir.is_by_name && dir.nr_looked_up >= LOOKUPS);
        if let Some(caller) = inner.callers.get_mut(&caller) {
            caller.nr_lookups += 1;
            (caller.mode, caller.nr_unused) = (ListingMode::Proven, 0);
        }
        if !forgets {
            return Vec::new();
        }
        inner.dirs.remove(&node);
        let mut forgotten = vec![node];
        while forgotten.len() < FORGOTTEN_MAX
            && let Some(other) = inner.order.pop_front()
        {
            forgotten.extend(inner.dirs.remove(&other).filter(|dir| dir.is_by_name).map(|_| other));
        }
        self.has_dirs.store(!inner.dirs.is_empty(), Ordering::Relaxed);
        forgotten
    }
}

impl ListingHistory {
    fn remember_caller(&mut self, listing: &Listing) {
        let mut state = listing.state;
        match self.callers.get_mut(&listing.caller) {
            Some(known) => {
                // Keep what lookups have shown during this answer.
                if known.nr_lookups != state.nr_lookups {
                    (state.mode, state.nr_unused, state.nr_lookups) = (ListingMode::Proven, 0, known.nr_lookups);
                }
                *known = state;
            }
            None => {
                if self.callers.len() >= CALLERS_MAX
                    && let Some((&oldest, _)) = self.callers.iter().min_by_key(|(_, caller)| caller.listed_at)
                {
                    self.callers.remove(&oldest);
                }
                self.callers.insert(listing.caller, state);
            }
        }
    }

    fn remember_dir(&mut self, listing: &Listing) {
        let is_by_name = listing.state.mode == ListingMode::Names;
        let new = ListedDir { caller: listing.caller, is_by_name, nr_looked_up: 0 };
        if let Some(known) = self.dirs.get_mut(&listing.node) {
            // The kernel may still have names of an earlier listing.
            *known = ListedDir { is_by_name: is_by_name || known.is_by_name, ..new };
            return;
        }
        if self.order.len() >= DIRS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.dirs.remove(&oldest);
        }
        self.dirs.insert(listing.node, new);
        self.order.push_back(listing.node);
    }
}

impl Listing {
    /// Whether the next entry comes without attributes.
    pub(crate) fn leaves_out(&mut self, is_dir: bool) -> bool {
        if is_dir {
            return false;
        }
        self.state.nr_since_sample += 1;
        let leaves_out = self.state.mode == ListingMode::Names || self.state.nr_since_sample >= SAMPLE;
        if leaves_out {
            self.state.nr_since_sample = 0;
            self.has_left_out = true;
        } else {
            self.state.nr_unused += 1;
        }
        leaves_out
    }
}

/// The attributes of one in this many entries are left out, to see whether the entry is looked up. A lookup takes about
/// as long as the attributes of five entries.
const SAMPLE: u64 = 128;
/// After this many entries in a row whose attributes are not used, listings have no attributes. Making these attributes
/// takes a tenth of a second. A program that uses attributes only after it has read the whole directory has to look up
/// all further entries.
const PATIENCE: u64 = 16 << 10;
/// This many lookups in a directory that was listed without attributes show that a program uses attributes.
const LOOKUPS: u32 = 16;
/// If a caller has listed nothing for this long, its number may belong to another thread.
const MEMORY: Duration = Duration::from_secs(10);
const CALLERS_MAX: usize = 256;
const DIRS_MAX: usize = 64 << 10;
/// The number of directories whose names the kernel forgets at once. This takes less than a millisecond.
const FORGOTTEN_MAX: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    /// Lists `nr` entries of a directory in answers of 200; returns how many came without attributes.
    fn list(listings: &Listings, caller: u32, node: u64, nr: u64) -> u64 {
        let mut nr_left_out = 0;
        for offset in (0..nr).step_by(200) {
            let mut listing = listings.begin(caller, node, offset);
            nr_left_out += (offset..nr.min(offset + 200)).filter(|_| listing.leaves_out(false)).count() as u64;
            assert!(!listing.leaves_out(true), "G1");
            listings.end(&listing);
        }
        nr_left_out
    }

    #[test]
    fn a_caller_that_looks_nothing_up_gets_names_alone() {
        let listings = Listings::default();
        let left_out = list(&listings, 7, 300, 100_000);
        assert!((80_000..90_000).contains(&left_out), "{left_out}");
        assert_eq!(list(&listings, 7, 301, 1000), 1000);
        assert!(list(&listings, 8, 302, 1000) < 10, "another caller");
    }

    #[test]
    fn a_caller_that_looks_samples_up_keeps_getting_attributes() {
        let listings = Listings::default();
        for node in 300..400 {
            let left_out = list(&listings, 7, node, 1000);
            assert!(left_out < 10, "{left_out}");
            (0..left_out).for_each(|_| assert_eq!(listings.looked_up(node), [0; 0]));
        }
    }

    #[test]
    fn a_caller_that_reads_a_large_directory_first_gets_attributes_of_the_next_one() {
        let listings = Listings::default();
        assert!(list(&listings, 7, 300, 50_000) > 30_000);
        listings.looked_up(300);
        for node in 301..310 {
            let left_out = list(&listings, 7, node, 50_000);
            assert!(left_out < 500, "G2: {left_out}");
            (0..left_out).for_each(|_| drop(listings.looked_up(node)));
        }
        assert!(list(&listings, 7, 310, 50_000) < 500);
        assert_eq!(list(&listings, 7, 311, 1000), 1000, "G2: not used in the last directory");
    }

    #[test]
    fn lists_of_names_are_forgotten_after_some_lookups() {
        let listings = Listings::default();
        list(&listings, 7, 300, 50_000);
        (1..=3).for_each(|nr| assert_eq!(list(&listings, 7, 300 + nr, 1000), 1000));
        let told: Vec<Vec<u64>> = (0..100).map(|_| listings.looked_up(302)).collect();
        let (first, others) = told.split_at(LOOKUPS as usize - 1);
        assert!(first.iter().all(Vec::is_empty), "G3");
        assert_eq!(others[0], [302, 300, 301, 303], "G3");
        assert!(others[1..].iter().all(Vec::is_empty), "each is told once");
        assert!(!listings.has_dirs.load(Ordering::Relaxed));
    }

    #[test]
    fn memory_is_limited() {
        let listings = Listings::default();
        list(&listings, 7, 1, 20_000);
        (0..2 * DIRS_MAX as u64).for_each(|node| assert_eq!(list(&listings, 7, 1000 + node, 1), 1));
        for caller in 100..1100 {
            list(&listings, caller, 5, 1);
        }
        let inner = listings.inner.lock();
        assert!(inner.dirs.len() <= DIRS_MAX && inner.order.len() <= DIRS_MAX, "G4");
        assert_eq!(inner.callers.len(), CALLERS_MAX, "G4");
    }
}
