//! Message ids in the order in which they were seen.
//!
//! There may be a million of them (SPEC G1), so each costs its digest and a byte: the numbers are
//! consecutive, and an id is found by how far its number is from the first one.
//!
//! Invariant: first and last place are taken, so that equal orders are equal values.

use std::collections::VecDeque;

use super::digest::Digest;

/// Empty places that are believed of a state that is read. They come of ids that were forgotten by
/// time, came anew before they were swept, and wait for the front to be swept past them.
const GAPS_MAX: u64 = 1 << 20;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Arrivals {
    /// The number of the first place; 0 where there is none.
    first: u64,
    /// An id that came anew, once it had been forgotten, leaves its place empty.
    ids: VecDeque<Option<Digest>>,
}

impl Arrivals {
    /// Ids with their numbers, in any order, where those can be right: given once each, up to `last`,
    /// and not so far apart that the places between them would take memory nobody has used.
    pub(super) fn of(ids: impl Iterator<Item = (u64, Digest)>, last: u64) -> Option<Self> {
        let mut ids: Vec<(u64, Digest)> = ids.collect();
        ids.sort_unstable_by_key(|(number, _)| *number);
        if let (Some((first, _)), Some((newest, _))) = (ids.first(), ids.last()) {
            let places_max = 2 * ids.len() as u64 + GAPS_MAX;
            if *first == 0 || *newest > last || newest - first > places_max {
                return None;
            }
        }
        if ids.windows(2).any(|pair| pair[0].0 == pair[1].0) {
            return None;
        }
        let mut arrivals = Self::default();
        for (number, id) in ids {
            arrivals.push(number, id);
        }
        Some(arrivals)
    }

    /// The next id; its number is greater than all before.
    pub(super) fn push(&mut self, number: u64, id: Digest) {
        if self.ids.is_empty() {
            self.first = number;
        }
        let place = (number - self.first) as usize;
        self.ids.resize(place, None);
        self.ids.push_back(Some(id));
    }

    /// The id of this number is gone, or has another number from now on.
    pub(super) fn remove(&mut self, number: u64) {
        let place = number.checked_sub(self.first).and_then(|at| self.ids.get_mut(at as usize));
        if let Some(place) = place {
            *place = None;
        }
        self.trim();
    }

    /// The oldest.
    pub(super) fn first(&self) -> Option<&Digest> {
        self.ids.front()?.as_ref()
    }

    /// Takes the oldest out.
    pub(super) fn pop_first(&mut self) -> Option<Digest> {
        let oldest = self.ids.front_mut()?.take();
        self.trim();
        oldest
    }

    /// The numbers of the oldest so many.
    pub(super) fn oldest(&self, count: usize) -> impl Iterator<Item = u64> + '_ {
        let taken = (self.first..).zip(&self.ids).filter(|(_, id)| id.is_some());
        taken.map(|(number, _)| number).take(count)
    }

    fn trim(&mut self) {
        while self.ids.front().is_some_and(Option::is_none) {
            self.ids.pop_front();
            self.first += 1;
        }
        while self.ids.back().is_some_and(Option::is_none) {
            self.ids.pop_back();
        }
        if self.ids.is_empty() {
            self.first = 0;
        }
        // A burst that has passed leaves no empty rooms behind.
        if self.ids.capacity() > 1_024 && self.ids.len() < self.ids.capacity() / 4 {
            self.ids.shrink_to(self.ids.len() * 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Push(u64),
        Remove(prop::sample::Index),
        Pop,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (1..4_u64).prop_map(Step::Push),
            2 => any::<prop::sample::Index>().prop_map(Step::Remove),
            1 => Just(Step::Pop),
        ];
        proptest::collection::vec(step, 0..200)
    }

    proptest! {
        #[test]
        fn it_does_as_an_ordered_map_does(steps in steps()) {
            let (mut arrivals, mut map) = (Arrivals::default(), BTreeMap::new());
            let mut last = 0;
            for step in steps {
                match step {
                    Step::Push(skipped) => {
                        last += skipped;
                        let id = u128::from(last).to_le_bytes();
                        arrivals.push(last, id);
                        map.insert(last, id);
                    }
                    Step::Remove(which) if !map.is_empty() => {
                        let number = *which.get(&map.keys().collect::<Vec<_>>());
                        let number = *number;
                        arrivals.remove(number);
                        map.remove(&number);
                    }
                    Step::Remove(_) => {}
                    Step::Pop => {
                        prop_assert_eq!(arrivals.pop_first(), map.pop_first().map(|(_, id)| id));
                    }
                }
                prop_assert_eq!(arrivals.first(), map.first_key_value().map(|(_, id)| id));
                let all: Vec<u64> = arrivals.oldest(usize::MAX).collect();
                prop_assert_eq!(all, map.keys().copied().collect::<Vec<_>>());
                let again = Arrivals::of(map.clone().into_iter(), last);
                prop_assert_eq!(Some(&arrivals), again.as_ref());
            }
        }
    }

    #[test]
    fn m4_numbers_that_cannot_be_are_refused() {
        let of = |numbers: &[u64], last| {
            Arrivals::of(numbers.iter().map(|number| (*number, [0; 16])), last)
        };
        assert!(of(&[1, 3, 9], 9).is_some());
        assert!(of(&[], 0).is_some());
        assert!(of(&[0, 1], 9).is_none(), "numbers begin with 1");
        assert!(of(&[1, 10], 9).is_none(), "that one was not given yet");
        assert!(of(&[4, 4], 9).is_none(), "given twice");
        assert!(of(&[1, 1 << 40], 1 << 41).is_none(), "too far apart");
    }
}
