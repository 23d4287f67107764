//! Where the threads that read /dev/fuse run: on every processor, or gathered on one.
//!
//! A client and the server take turns. If they run on two processors, each turn wakes a thread on another processor,
//! which is idle; in a virtual machine an idle processor is halted, and waking it takes longer than the request. If all
//! threads of the server are on the processor of a lone client, a turn is a switch between two threads. Many clients, or large reads and writes, need all processors. No number tells these cases apart
//! reliably, so both ways are tried, and the better one is kept for a while.
//!
//! ```text
//!   Sparse --dense requests--> Trial --3 windows of each--> Stay --its end, or slow windows--> Trial
//!      ^------------------------------ a sparse window -------------------------------------/
//! ```
//!
//! - L1. A window is [`WINDOW`] requests. While requests are sparse, the threads may run on every processor.
//! - L2. Threads are spread if that made a trial faster by more than one [`MARGIN`]th. With a smaller difference they
//!   are gathered: threads that a trial has gathered stay together for a while when they are spread, so a trial shows
//!   less of a lone client's gain than there is. If a few windows in a row are much slower than the trial was, the next
//!   trial begins.
//! - L3. Threads are gathered where the client of the last request ran, and follow it.
//! - L4. A thread that steps aside may run on every processor, and so may the threads that it starts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::Pid;
use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// The places of the threads of one connection.
#[derive(Debug)]
pub(super) struct Placement {
    /// The processors of the process; `None` if it has only one, and nothing is to be decided.
    allowed: Option<CpuSet>,
    nr_requests: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    judge: Judge,
    /// When the window began.
    began: Instant,
    /// The threads that are not aside.
    threads: Vec<Pid>,
    /// The processor on which the threads are gathered.
    gathered: Option<CpuSet>,
}

/// Where the threads run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Spread,
    Gathered,
}

/// Decides on the mode of each window from the time that the last one took.
#[derive(Debug)]
struct Judge {
    phase: Phase,
    /// The mode that won the last trial.
    winner: Mode,
    /// How many windows the next winner stays.
    stay: u32,
}

#[derive(Debug)]
enum Phase {
    Sparse,
    /// The times of the windows so far: gathered and spread windows in turn, beginning with a gathered one.
    Trial(Vec<Duration>),
    Stay {
        left: u32,
        /// The time of a window of the winner in the trial.
        usual: Duration,
        /// How many slow windows came in a row.
        nr_slow: u32,
    },
}

impl Placement {
    /// Makes a placement for threads that call [`Placement::join`].
    pub(super) fn new() -> Self {
        let allowed = sched_getaffinity(None).ok().filter(|set| set.count() > 1);
        let judge = Judge { phase: Phase::Sparse, winner: Mode::Spread, stay: STAY_MIN };
        let state = State { judge, began: Instant::now(), threads: Vec::new(), gathered: None };
        Self { allowed, nr_requests: AtomicU64::new(0), state: Mutex::new(state) }
    }

    /// Counts a request that the calling thread answered. `own` is the thread's count; `of_client` finds the processor
    /// of the client.
    pub(super) fn note_request(&self, own: &mut u64, of_client: impl FnOnce() -> Option<usize>) {
        *own += 1;
        if own.is_multiple_of(SHARE) && self.allowed.is_some() {
            let nr = self.nr_requests.fetch_add(SHARE, Ordering::Relaxed) + SHARE;
            if nr.is_multiple_of(WINDOW) {
                self.window_ended(of_client);
            }
        }
    }

    /// Puts the calling thread where the other threads are. Called when it begins or steps back.
    pub(super) fn join(&self) {
        let mut state = self.state.lock();
        let own = gettid();
        if !state.threads.contains(&own) {
            state.threads.push(own);
        }
        if let Some(place) = state.gathered.or(self.allowed) {
            move_thread(None, &place);
        }
    }

    /// Lets the calling thread run everywhere. Called when it ends or steps aside (L4).
    pub(super) fn leave(&self) {
        let own = gettid();
        let mut state = self.state.lock();
        state.threads.retain(|thread| *thread != own);
        if let (Some(_), Some(allowed)) = (&state.gathered, &self.allowed) {
            move_thread(None, allowed);
        }
    }

    fn window_ended(&self, of_client: impl FnOnce() -> Option<usize>) {
        let (Some(mut state), Some(allowed)) = (self.state.try_lock(), &self.allowed) else { return };
        let now = Instant::now();
        let took = now - state.began;
        state.began = now;
        let place = match state.judge.next(took) {
            Mode::Spread => None,
            // Finding the client takes some time.
            Mode::Gathered if state.gathered.is_some() && !state.judge.should_look() => return,
            Mode::Gathered => {
                let usable = |processor: &usize| *processor < CpuSet::MAX_CPU && allowed.is_set(*processor);
                let mut set = CpuSet::new();
                set.set(of_client().filter(usable).unwrap_or_else(|| sched_getcpu().min(CpuSet::MAX_CPU - 1)));
                Some(set)
            }
        };
        if place == state.gathered {
            return;
        }
        state.gathered = place;
        let place = place.unwrap_or(*allowed);
        state.threads.iter().for_each(|thread| move_thread(Some(*thread), &place));
    }
}

fn move_thread(thread: Option<Pid>, place: &CpuSet) {
    if let Err(errno) = sched_setaffinity(thread, place) {
        tracing::debug!("a thread stays where it is: {errno}");
    }
}

impl Judge {
    /// The mode of the next window, after one that took `took`.
    fn next(&mut self, took: Duration) -> Mode {
        if took > SPARSE {
            self.phase = Phase::Sparse;
            return Mode::Spread;
        }
        match &mut self.phase {
            Phase::Sparse => self.begin_trial(),
            Phase::Trial(times) => {
                times.push(took);
                match times.len() {
                    len if len < NR_TRIALS => [Mode::Gathered, Mode::Spread][len % 2],
                    _ => self.decide(),
                }
            }
            Phase::Stay { left, usual, nr_slow } => {
                *nr_slow = if took > *usual * 3 / 2 { *nr_slow + 1 } else { 0 };
                *left = left.saturating_sub(1);
                if *nr_slow >= NR_SLOW {
                    self.stay = STAY_MIN;
                }
                match *left == 0 || *nr_slow >= NR_SLOW {
                    true => self.begin_trial(),
                    false => self.winner,
                }
            }
        }
    }

    /// Whether the client may run elsewhere by now (L3): after a slow window, and now and then.
    fn should_look(&self) -> bool {
        match &self.phase {
            Phase::Stay { left, nr_slow, .. } => *nr_slow > 0 || left.is_multiple_of(LOOK),
            _ => true,
        }
    }

    fn begin_trial(&mut self) -> Mode {
        self.phase = Phase::Trial(Vec::with_capacity(NR_TRIALS));
        Mode::Gathered
    }

    /// Ends a trial. Compares medians, because a single window may be slow for other reasons.
    fn decide(&mut self) -> Mode {
        let Phase::Trial(times) = &self.phase else { return self.winner };
        let [gathered, spread] = [0, 1].map(|first| {
            let mut of_mode: Vec<Duration> = times.iter().skip(first).step_by(2).copied().collect();
            of_mode.sort_unstable();
            of_mode[of_mode.len() / 2]
        });
        let winner = if spread + gathered / MARGIN < gathered { Mode::Spread } else { Mode::Gathered };
        self.stay = if winner == self.winner { (self.stay * 2).min(STAY_MAX) } else { STAY_MIN };
        self.winner = winner;
        let usual = if winner == Mode::Gathered { gathered } else { spread };
        self.phase = Phase::Stay { left: self.stay, usual, nr_slow: 0 };
        winner
    }
}

/// Requests in a window: some milliseconds of dense requests.
const WINDOW: u64 = 256;
/// Requests that a thread counts before it adds them to the count of all threads.
const SHARE: u64 = 16;
/// A window that takes longer is sparse: waking processors costs little of its time.
const SPARSE: Duration = Duration::from_millis(50);
/// The windows of a trial, half of them in each mode.
const NR_TRIALS: usize = 6;
/// The threads are spread if that saves more than one `MARGIN`th of the time.
const MARGIN: u32 = 8;
/// How many windows the winner of a trial stays; the number doubles while the same mode wins.
const STAY_MIN: u32 = 32;
const STAY_MAX: u32 = 1024;
/// The number of windows after which gathered threads look where the client runs.
const LOOK: u32 = 8;
/// So many windows in a row that take half as long again as in the trial begin a new trial.
const NR_SLOW: u32 = 4;
const _: () = assert!(WINDOW.is_multiple_of(SHARE) && NR_TRIALS.is_multiple_of(2));

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs windows that take these milliseconds when gathered and spread; returns how many were gathered.
    fn run(judge: &mut Judge, mode: &mut Mode, nr: u32, [gathered, spread]: [u64; 2]) -> u32 {
        let mut nr_gathered = 0;
        for _ in 0..nr {
            let is_gathered = *mode == Mode::Gathered;
            nr_gathered += u32::from(is_gathered);
            *mode = judge.next(Duration::from_millis(if is_gathered { gathered } else { spread }));
        }
        nr_gathered
    }

    fn new() -> (Judge, Mode) {
        (Judge { phase: Phase::Sparse, winner: Mode::Spread, stay: STAY_MIN }, Mode::Spread)
    }

    #[test]
    fn the_faster_mode_gets_nearly_all_windows() {
        let (mut judge, mut mode) = new();
        assert!(run(&mut judge, &mut mode, 2000, [2, 5]) > 1900);
        let (mut judge, mut mode) = new();
        assert!(run(&mut judge, &mut mode, 2000, [5, 2]) < 100);
        let (mut judge, mut mode) = new();
        assert!(run(&mut judge, &mut mode, 2000, [41, 40]) > 1900, "L2: no clear gain");
    }

    #[test]
    fn threads_are_spread_while_requests_are_sparse() {
        let (mut judge, mut mode) = new();
        assert_eq!(run(&mut judge, &mut mode, 100, [70, 70]), 0, "L1");
        run(&mut judge, &mut mode, 100, [2, 5]);
        assert_eq!(mode, Mode::Gathered);
        assert_eq!(run(&mut judge, &mut mode, 100, [70, 70]), 1, "L1");
    }

    #[test]
    fn a_change_of_the_load_is_noticed_soon() {
        let (mut judge, mut mode) = new();
        run(&mut judge, &mut mode, 5000, [2, 5]);
        assert!(run(&mut judge, &mut mode, 200, [8, 3]) < 30, "L2: now spread is better");
        assert_eq!(mode, Mode::Spread);
    }

    #[test]
    fn threads_move_together_and_run_everywhere_while_aside() {
        let Some(all) = sched_getaffinity(None).ok().filter(|set| set.count() > 1) else {
            assert!(std::env::var_os("CI").is_none(), "CI needs two processors");
            eprintln!("SKIPPED: this test needs two processors");
            return;
        };
        let placement = Placement::new();
        placement.join();
        let mut own = 0;
        // The processor of a client may not be ours to use.
        let mut request = || placement.note_request(&mut own, || Some(CpuSet::MAX_CPU));
        // The first window ends the sparse phase; the second is gathered.
        (0..WINDOW).for_each(|_| request());
        assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                placement.join();
                assert_eq!(sched_getaffinity(None).unwrap().count(), 1, "a new thread goes to the others");
                placement.leave();
                assert_eq!(sched_getaffinity(None).unwrap(), all);
            });
        });
        placement.leave();
        assert_eq!(sched_getaffinity(None).unwrap(), all, "L4");
        placement.join();
        assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
        (0..WINDOW).for_each(|_| placement.note_request(&mut own, || None));
        assert_eq!(sched_getaffinity(None).unwrap(), all, "the next window is spread");
        let last = (0..CpuSet::MAX_CPU).rfind(|processor| all.is_set(*processor)).unwrap();
        (0..WINDOW).for_each(|_| placement.note_request(&mut own, || Some(last)));
        let here = sched_getaffinity(None).unwrap();
        assert!(here.count() == 1 && here.is_set(last), "L3");
        placement.leave();
    }
}
