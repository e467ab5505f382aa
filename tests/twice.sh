#!/bin/sh
# sh tests/twice.sh PART PYTEST OPTIONS...
# Tests that fail beside others run a second time: alone, one after the other. Those that fail again have failed.
# Anything but failed tests (a collection error, an interruption, no tests at all) fails at once.
part=$1
shift
cache=.pytest_cache/$part
rm -rf "$cache"
"$@" -o cache_dir="$cache"
code=$?
[ $code -eq 1 ] || exit $code

echo "=== $part: tests failed. A second run, of these alone, decides:"
"$@" -o cache_dir="$cache" -n 0 --dist no -vv --last-failed --last-failed-no-failures none || exit
echo "=== $part: the tests above failed beside others and passed alone."
