//! Stacks with weights, as flame graphs are drawn from and as the folded format writes them.

use crate::Error;
use crate::text::{clean, shorten};
use std::collections::HashMap;

/// Longest frame name, in characters. Names beyond it are cut with `…`.
const LONGEST_NAME: usize = 500;

/// The name of a frame, within one [`Folded`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Name(u32);

/// Stacks of frames, root first, with `N` weights each: one, or two for a differential. Equal stacks add up; stacks
/// without frames or weight are left out.
///
/// In frame names `;` becomes `:`, and line breaks, control characters and directional marks are replaced, so that
/// the folded text means the same to every reader of it.
#[derive(Clone, Debug)]
pub struct Folded<const N: usize> {
    /// By number, each different from the others.
    names: Vec<String>,
    /// Of names as they are given, and as they became.
    numbers: HashMap<String, Name>,
    stacks: Vec<(Vec<Name>, [u64; N])>,
    totals: [u128; N],
}

impl<const N: usize> Default for Folded<N> {
    fn default() -> Self {
        Self { names: Vec::new(), numbers: HashMap::new(), stacks: Vec::new(), totals: [0; N] }
    }
}

impl<const N: usize> Folded<N> {
    /// The name by which a frame is added.
    pub fn name(&mut self, text: &str) -> Name {
        if let Some(&name) = self.numbers.get(text) {
            return name;
        }
        let becomes = frame_name(text);
        let known = self.numbers.get(&becomes).copied();
        let name = known.unwrap_or_else(|| {
            // A name takes more than a byte of memory: there are never so many.
            let name = Name(u32::try_from(self.names.len()).unwrap_or(u32::MAX));
            self.names.push(becomes.clone());
            self.numbers.insert(becomes, name);
            name
        });
        self.numbers.insert(text.to_owned(), name);
        name
    }

    /// Adds a stack, root first.
    pub fn add(&mut self, stack: impl IntoIterator<Item = Name>, weights: [u64; N]) {
        let stack: Vec<Name> = stack.into_iter().collect();
        if stack.is_empty() || weights.iter().all(|weight| *weight == 0) {
            return;
        }
        self.totals.iter_mut().zip(weights).for_each(|(total, weight)| *total += u128::from(weight));
        self.stacks.push((stack, weights));
    }

    /// The folded format: `root;…;leaf weight` lines, in order of their frames.
    ///
    /// # Errors
    /// [`Error::Empty`] when no stack has weight, and [`Error::WeightOverflow`].
    pub fn text(&self) -> Result<String, Error> {
        let sorted = self.sorted()?;
        Ok(sorted.stacks.iter().map(|(stack, weights)| sorted.line(stack, weights) + "\n").collect())
    }

    /// Each stack once, in order of the frames' names. (Sorting folded lines by their bytes would tear equal roots
    /// apart: `;` comes after a space.)
    pub(crate) fn sorted(&self) -> Result<Sorted<'_, N>, Error> {
        if self.stacks.is_empty() {
            return Err(Error::Empty("samples"));
        }
        if self.totals.iter().any(|total| u64::try_from(*total).is_err()) {
            return Err(Error::WeightOverflow);
        }
        let mut order: Vec<u32> = (0..).take(self.names.len()).collect();
        order.sort_unstable_by_key(|number| &self.names[*number as usize]);
        let mut ranks = vec![0u32; order.len()];
        for (rank, number) in (0..).zip(&order) {
            ranks[*number as usize] = rank;
        }
        let ranked = |(stack, weights): &(Vec<Name>, [u64; N])| {
            (stack.iter().map(|name| ranks[name.0 as usize]).collect(), *weights)
        };
        let mut stacks: Vec<(Vec<u32>, [u64; N])> = self.stacks.iter().map(ranked).collect();
        stacks.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        stacks.dedup_by(|(next, more), (stack, weights)| {
            let is_same = next == stack;
            if is_same {
                weights.iter_mut().zip(more).for_each(|(sum, weight)| *sum += *weight);
            }
            is_same
        });
        let names = order.into_iter().map(|number| self.names[number as usize].as_str()).collect();
        Ok(Sorted { names, stacks })
    }
}

impl<const N: usize, T: AsRef<str>> FromIterator<(Vec<T>, [u64; N])> for Folded<N> {
    fn from_iter<I: IntoIterator<Item = (Vec<T>, [u64; N])>>(stacks: I) -> Self {
        let mut folded = Self::default();
        for (stack, weights) in stacks {
            let stack: Vec<Name> = stack.iter().map(|name| folded.name(name.as_ref())).collect();
            folded.add(stack, weights);
        }
        folded
    }
}

/// Different stacks, in order of their frames.
pub(crate) struct Sorted<'a, const N: usize> {
    /// In their order.
    pub(crate) names: Vec<&'a str>,
    /// Frames as positions in `names`.
    pub(crate) stacks: Vec<(Vec<u32>, [u64; N])>,
}

impl<const N: usize> Sorted<'_, N> {
    /// A line of the folded format, without its end.
    pub(crate) fn line(&self, stack: &[u32], weights: &[u64]) -> String {
        let mut out = String::new();
        for (level, name) in stack.iter().enumerate() {
            if level > 0 {
                out.push(';');
            }
            out.push_str(self.names[*name as usize]);
        }
        for weight in weights {
            out.push(' ');
            out.push_str(&weight.to_string());
        }
        out
    }
}

impl Sorted<'_, 1> {
    /// The same picture with less: frames that take less than a share of the whole are left out, their weight stays
    /// with the frame below them. The outermost frame of a stack always stays.
    pub(crate) fn visible(&self, least_share: f64) -> Vec<(&[u32], u64)> {
        let total: u64 = self.stacks.iter().map(|(_, [weight])| weight).sum();
        let least = least_share * total as f64;
        // How much of each stack stays.
        let mut depths: Vec<usize> = self.stacks.iter().map(|(stack, _)| stack.len()).collect();
        // The frames that the stacks at hand share: the first of these stacks, and the weight before it.
        let mut open: Vec<(usize, u64)> = Vec::new();
        let mut weight_before = 0;
        let mut last: &[u32] = &[];
        let ends = std::iter::once((&[][..], 0));
        let all = self.stacks.iter().map(|(stack, [weight])| (stack.as_slice(), *weight)).chain(ends);
        for (i, (stack, weight)) in all.enumerate() {
            let shared = last.iter().zip(stack).take_while(|(a, b)| a == b).count();
            while open.len() > shared
                && let Some((first, before)) = open.pop()
            {
                if ((weight_before - before) as f64) < least {
                    depths[first..i].iter_mut().for_each(|depth| *depth = (*depth).min(open.len().max(1)));
                }
            }
            open.resize(stack.len(), (i, weight_before));
            weight_before += weight;
            last = stack;
        }
        let mut visible: Vec<(&[u32], u64)> = Vec::new();
        for ((stack, [weight]), depth) in self.stacks.iter().zip(depths) {
            let stack = &stack[..depth];
            match visible.last_mut() {
                Some((last, sum)) if *last == stack => *sum += weight,
                _ => visible.push((stack, *weight)),
            }
        }
        visible
    }
}

/// A name that cannot be mistaken for syntax of the folded format: separators, a count at the end, a comment.
fn frame_name(name: &str) -> String {
    let name = clean(name);
    let name = shorten(name.trim(), LONGEST_NAME).replace(';', ":");
    let name = match name.rsplit_once(' ') {
        // A no-break space keeps `worker 3` from being read as `worker`, 3 times.
        Some((head, last)) if last.chars().all(|c| c.is_ascii_digit() || c == '.') => {
            format!("{head}\u{a0}{last}")
        }
        _ => name,
    };
    if name.is_empty() {
        return "[unnamed]".to_owned();
    }
    if name.starts_with("# ") { format!("[{name}]") } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn text(stacks: Vec<(Vec<&str>, u64)>) -> String {
        let folded: Folded<1> = stacks.into_iter().map(|(stack, weight)| (stack, [weight])).collect();
        folded.text().expect("has weight")
    }

    #[test]
    fn equal_stacks_add_up_in_order_of_frames() {
        let stacks = vec![
            (vec!["a", "c"], 1),
            (vec!["a b", "x"], 5),
            (vec!["a"], 2),
            (vec!["a", "c"], 3),
            (vec![], 9),
            (vec!["z"], 0),
        ];
        assert_eq!(text(stacks), "a 2\na;c 4\na b;x 5\n");
    }

    #[test]
    fn names_cannot_be_mistaken_for_syntax() {
        assert_eq!(frame_name("worker 3"), "worker\u{a0}3");
        assert_eq!(frame_name("a;b"), "a:b");
        assert_eq!(frame_name(" \n "), "[unnamed]");
        assert_eq!(frame_name("# note"), "[# note]");
        assert_eq!(frame_name("operator new(unsigned long)"), "operator new(unsigned long)");
        assert_eq!(text(vec![(vec!["worker 3"], 7)]), "worker\u{a0}3 7\n");
        assert_eq!(text(vec![(vec!["a;b"], 1), (vec!["a:b"], 2)]), "a:b 3\n");
    }

    #[test]
    fn too_much_is_an_error() {
        let huge: Folded<1> = [(vec!["a"], [u64::MAX]), (vec!["b"], [1])].into_iter().collect();
        assert!(matches!(huge.text(), Err(Error::WeightOverflow)));
        assert!(matches!(Folded::<1>::default().text(), Err(Error::Empty(_))));
    }

    /// Weight of each frame with what is above it, by its path.
    fn widths<'a>(stacks: impl Iterator<Item = (&'a [u32], u64)>) -> BTreeMap<Vec<u32>, u64> {
        let mut widths = BTreeMap::new();
        for (stack, weight) in stacks {
            for depth in 0..=stack.len() {
                *widths.entry(stack[..depth].to_vec()).or_default() += weight;
            }
        }
        widths
    }

    proptest! {
        #[test]
        fn names_that_were_made_safe_stay(name in "\\PC{0,9}[ ;#0-9.]{0,4}\\PC{0,3}[ ;#0-9.]{0,4}") {
            let safe = frame_name(&name);
            prop_assert_eq!(frame_name(&safe), safe);
        }

        #[test]
        fn visible_frames_are_as_wide_as_they_were(
            stacks in prop::collection::vec((prop::collection::vec(0u32..3, 1..6), 1u64..50), 1..40),
            share in 0.0f64..0.3,
        ) {
            let names = ["a", "b", "c"];
            let named = |(stack, weight): (Vec<u32>, u64)| {
                (stack.into_iter().map(|name| names[name as usize]).collect(), [weight])
            };
            let folded: Folded<1> = stacks.into_iter().map(named).collect();
            let sorted = folded.sorted().expect("has weight");
            let mut all = widths(sorted.stacks.iter().map(|(stack, [weight])| (stack.as_slice(), *weight)));
            let visible = sorted.visible(share);
            let total = all[&vec![]];
            all.retain(|path, width| path.len() <= 1 || *width as f64 >= share * total as f64);
            prop_assert_eq!(widths(visible.iter().copied()), all);
            // Each frame is one rectangle: where stacks that begin alike stood together they still do.
            for (i, (stack, _)) in visible.iter().enumerate() {
                for depth in 1..=stack.len() {
                    let again = visible[i + 1..].iter().position(|(other, _)| other.starts_with(&stack[..depth]));
                    prop_assert!(again.is_none_or(|at| visible[i + 1..=i + 1 + at].iter().all(|(other, _)| other.starts_with(&stack[..depth]))));
                }
            }
        }
    }
}
